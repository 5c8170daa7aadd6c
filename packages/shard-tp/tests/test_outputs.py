"""What split layers return is changed in place as in plain PyTorch, and torch warns of nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shard_core import get_strategy

PLANS = {
    "whole at the end": {"up": "colwise", "down": "rowwise"},
    "gathered": {"up": "colwise_gather_output", "down": "colwise_gather_output"},
}


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(inputs).relu_())


def loss_of(model: nn.Module) -> torch.Tensor:
    outputs = model(torch.linspace(-1, 1, 8).reshape(2, 4))
    outputs += 1
    return outputs.square().mean()


def gradients(plan: dict[str, str], as_function: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    def split(module: nn.Module, mesh: Any) -> None:
        parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    how: dict[str, Any] = {"parallelize_fn": split} if as_function else {"plan": plan}
    with get_strategy("tp", accelerator="cpu", tensor_parallel_size=2, unit_bytes=1, **how) as strategy:
        torch.manual_seed(0)
        model = strategy.setup_module(Perceptron())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy.backward(loss_of(model), model)
        return strategy.module_gradients(model), [str(each.message) for each in caught if "view" in str(each.message)]


@pytest.mark.parametrize(
    ("plan", "as_function"), [*((plan, False) for plan in PLANS.values()), ({}, True)], ids=[*PLANS, "by hand"]
)
def test_outputs_are_changed_in_place(worlds: Any, plan: dict[str, str], as_function: bool) -> None:
    torch.manual_seed(0)
    model = Perceptron()
    loss_of(model).backward()
    (seen, warned), (_, also_warned) = worlds(2).run(gradients, plan, as_function)
    torch.testing.assert_close(seen, {name: each.grad for name, each in model.named_parameters()})
    assert warned == also_warned == []
