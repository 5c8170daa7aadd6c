"""What the module's parameters show once an optimizer has zeroed gradients: none, as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import oracle, set_up


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)


def shown(stage: int, when: str) -> list[int]:
    """Return how many gradients the module shows: after a step, and after the optimizer has zeroed them."""
    with get_strategy("deepspeed", stage=stage) as strategy:
        if when == "late":
            model = strategy.setup_module(nn.Linear(4, 4))
            optimizer = strategy.setup_optimizer(sgd(model))
        else:
            model, optimizer = set_up(strategy, lambda: nn.Linear(4, 4), sgd)
        strategy.backward(model(torch.ones(2, 4)).sum(), model)
        strategy.optimizer_step(optimizer)
        counts = [sum(each.grad is not None for each in model.parameters())]
        optimizer.zero_grad()
        return [*counts, sum(each.grad is not None for each in model.parameters())]


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zeroed_gradients_are_gone_at_once(worlds: Any, stage: int, when: str) -> None:
    for counts in worlds(2).run(shown, stage, when):
        assert counts == [2, 0]


def train_cast(stage: int) -> str:
    with get_strategy("deepspeed", stage=stage) as strategy:
        model, _ = set_up(strategy, lambda: nn.Linear(4, 4), sgd)
        model.bfloat16()
        with pytest.raises(SetupError) as error:
            strategy.backward(model(torch.ones(2, 4, dtype=torch.bfloat16)).sum(), model)
        return str(error.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_was_cast_is_not_trained(worlds: Any, stage: int) -> None:
    for message in worlds(2).run(train_cast, stage):
        assert message.startswith("'weight' is torch.bfloat16 and was torch.float32 at setup")


def cast_and_back(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Any) -> None:
    """Evaluate in bfloat16 between steps."""
    inputs = torch.linspace(-1, 1, 8).reshape(2, 4)
    for number in range(3):
        if number:
            model.bfloat16()
            with torch.no_grad():
                model(inputs.bfloat16())
            model.float()
        backward(model(inputs * (number + 1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def cast_under_a_strategy(stage: int) -> dict[str, torch.Tensor]:
    with get_strategy("deepspeed", stage=stage) as strategy:
        model, optimizer = set_up(strategy, lambda: nn.Linear(4, 4), sgd)
        cast_and_back(model, optimizer, lambda loss: strategy.backward(loss, model))
        return strategy.module_state_dict(model)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_module_may_be_cast_and_back_once_they_are(worlds: Any, stage: int) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    cast_and_back(plain, sgd(plain), torch.Tensor.backward)
    weights, _ = worlds(2).run(cast_under_a_strategy, stage)
    oracle.assert_same_weights(weights, plain.state_dict(), 1e-6)
