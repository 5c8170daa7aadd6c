"""Modules that another strategy has trained and left: set up again where they are whole, else refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import oracle

WHOLE = ("ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")  # small parameters stay whole at stage 3
SPREAD: dict[str, dict[str, Any]] = {"fsdp": {}, "deepspeed_stage_3": {"param_persistence_threshold": 0}}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model: Any, optimizer: torch.optim.Optimizer, backward: Any) -> None:
    inputs = torch.linspace(-1, 1, 24).reshape(4, 6)
    for number in range(2):
        backward(model(inputs * (number + 1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)


def one_after_the_other(first: str, second: str) -> dict[str, torch.Tensor]:
    module = network()
    for name in (first, second):
        with get_strategy(name) as strategy:
            model, (optimizer,) = strategy.setup_module_and_optimizers(module, [sgd(module)])
            train(model, optimizer, lambda loss, model=model: strategy.backward(loss, model))
            module, weights = strategy.unwrap(model), strategy.module_state_dict(model)
    return weights


@pytest.mark.parametrize("second", [*WHOLE, "fsdp"])
@pytest.mark.parametrize("first", [*[pytest.param(each, marks=pytest.mark.long) for each in WHOLE[:-1]], WHOLE[-1]])
def test_what_is_whole_is_trained_on_by_another_strategy(worlds: Any, first: str, second: str) -> None:
    plain = network()
    for _ in range(2):
        train(plain, sgd(plain), torch.Tensor.backward)
    weights, _ = worlds(2).run(one_after_the_other, first, second)
    oracle.assert_same_weights(weights, plain.state_dict(), 1e-6)


def refused(first: str, second: str) -> str:
    with get_strategy(first, **SPREAD[first]) as strategy:
        module = strategy.unwrap(strategy.setup_module(network()))
    with get_strategy(second) as strategy, pytest.raises(SetupError) as error:
        strategy.setup_module(module)
    return str(error.value)


@pytest.mark.parametrize("second", ["ddp", "deepspeed_stage_3", "fsdp"])
@pytest.mark.parametrize("first", SPREAD)
def test_what_is_spread_over_ranks_is_refused(worlds: Any, first: str, second: str) -> None:
    for said in worlds(2).run(refused, first, second):
        assert said.startswith("parameter '0.weight' is spread over ranks already"), said
