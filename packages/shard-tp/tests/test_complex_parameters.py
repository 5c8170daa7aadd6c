"""Complex layers beside real ones, of which a plan splits either or both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import oracle, set_up

PLAN = {"first": "colwise", "second": "rowwise"}


class Network(nn.Module):
    """Two complex layers, of which the second may be real, and a real one."""

    def __init__(self, second: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, dtype=torch.complex64)
        self.second = nn.Linear(8, 6, dtype=second)
        self.last = nn.Linear(6, 30)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs.to(torch.complex64))
        hidden = hidden if self.second.weight.is_complex() else hidden.abs()
        return self.last(self.second(hidden).abs())


def complex_alone() -> nn.Module:
    return Network(torch.complex64)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Any) -> None:
    inputs = torch.linspace(-1, 1, 24).reshape(4, 6)
    for number in range(3):
        backward(model(inputs * (number + 1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def split_complex_layers() -> dict[str, torch.Tensor]:
    with get_strategy("tp", tensor_parallel_size=2, plan=PLAN) as strategy:
        model, optimizer = set_up(strategy, complex_alone, sgd)
        train(model, optimizer, lambda loss: strategy.backward(loss, model))
        return strategy.module_state_dict(model)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_complex_layers_are_split_beside_a_whole_real_one(worlds: Any, ranks: int) -> None:
    torch.manual_seed(0)
    plain = complex_alone()
    train(plain, sgd(plain), torch.Tensor.backward)
    weights, *_ = worlds(ranks).run(split_complex_layers)
    oracle.assert_same_weights(weights, plain.state_dict(), 1e-5)


def split_both() -> str:
    with get_strategy("tp", tensor_parallel_size=2, plan=PLAN) as strategy, pytest.raises(SetupError) as error:
        strategy.setup_module(Network(torch.float32))
    return str(error.value)


def test_complex_and_real_layers_are_not_split_together(worlds: Any) -> None:
    for said in worlds(2).run(split_both):
        assert said.endswith("which torch does not shard together; leave one of both out of the plan.")
