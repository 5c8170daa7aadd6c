"""Embeddings with max_norm are refused, frozen ones too: each rank would write rows of its own samples."""

from typing import Any

from torch import nn

from shard_core import SetupError, get_strategy


def refused(trained: bool) -> str:
    module = nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 4))
    module[0].requires_grad_(trained)
    with get_strategy("fsdp") as strategy:
        try:
            strategy.setup_module(module)
        except SetupError as error:
            return str(error)
    return ""


def test_sharded_embeddings_are_refused(worlds: Any) -> None:
    for trained in (False, True):
        for message in worlds(2).run(refused, trained):
            assert "the embedding '0' has max_norm, by which its forward rescales rows" in message
