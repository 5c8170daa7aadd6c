"""Ranks whose losses use different parameters are told so: upstream would mix up their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from xla_environments import HASTY

from shard_core import SetupError, get_strategy


class Either(nn.Module):
    """Has two layers of one size, and runs one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, side: str) -> torch.Tensor:
        return getattr(self, side)(x).square().mean()


def each_its_own() -> str:
    with get_strategy("xla_fsdp", accelerator="xla") as strategy:
        model = strategy.setup_module(Either())
        inputs = strategy.batch_to_device(torch.ones(2, 4))
        loss = model(inputs, ("left", "right")[strategy.global_rank])
        try:
            strategy.backward(loss, model)
        except SetupError as error:
            return str(error)
        return "gradients are mixed up, and nobody says so"


def test_what_would_be_mixed_up_is_refused(worlds: Any) -> None:
    for refusal in worlds(2, HASTY).run(each_its_own):
        assert refusal.startswith("the loss of rank 0 has used 'left.weight' and those of other ranks have not;")
