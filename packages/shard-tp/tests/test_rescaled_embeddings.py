"""Embeddings with max_norm train where all ranks look up the same rows, if the plan leaves them whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shard_core import SetupError, get_strategy

SAMPLES = [torch.tensor([1, 2, 3, 4]), torch.tensor([3, 5, 6, 0]), torch.tensor([1, 1, 7, 2])]
PLAN = {"1": "colwise", "3": "rowwise"}


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def trained(plan: dict[str, str], tensor_parallel_size: int) -> dict[str, torch.Tensor] | str:
    try:
        with get_strategy("tp", tensor_parallel_size=tensor_parallel_size, plan=plan) as strategy:
            module = made()
            model, (optimizer,) = strategy.setup_module_and_optimizers(
                module, [torch.optim.SGD(module.parameters(), lr=0.5)]
            )
            for samples in SAMPLES:
                strategy.backward(model(samples).square().mean(), model)
                strategy.optimizer_step(optimizer)
                optimizer.zero_grad()
            whole: Any = model.state_dict()
            return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in whole.items()}
    except SetupError as error:
        return str(error)


def test_all_ranks_rescale_the_same_rows(worlds: Any) -> None:
    module = made()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for samples in SAMPLES:
        module(samples).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in worlds(2).run(trained, PLAN, 2):
        torch.testing.assert_close(weights, dict(module.state_dict()))


def test_a_split_embedding_is_refused(worlds: Any) -> None:
    for message in worlds(2).run(trained, {**PLAN, "0": "rowwise"}, 2):
        assert (
            "the embedding '0' has max_norm, by which its forward rescales rows, and this strategy spreads" in message
        )
