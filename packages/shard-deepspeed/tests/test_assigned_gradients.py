"""A gradient that is computed from ``p.grad`` of a module's parameter and assigned to it counts as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import models, oracle, set_up, whole_weights

_STEPS, _BATCH = 3, 12


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def mean_squares(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def assign(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = -0.5 * parameter.grad.clone().add_(0.001)
        parameter.grad = (parameter.grad / torch.tensor(3.0)).clamp(-0.02, 0.02)


def loop(model: Any, backward: Any, step: Any, share: Any) -> None:
    """Train on two backwards a step, each followed by an assignment."""
    for batch in models.batches("plain", _STEPS, _BATCH):
        for _ in range(2):
            backward(mean_squares(model, share(batch)))
            assign(model)
        step()


def plain() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    loop(model, lambda loss: loss.backward(), step, lambda batch: batch)
    return model.state_dict()


def trained(stage: int) -> dict[str, torch.Tensor]:
    with get_strategy("deepspeed", stage=stage) as strategy:
        model, optimizer = set_up(strategy, Net, sgd)

        def step() -> None:
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()

        share = lambda batch: models.share_of(strategy, batch)  # noqa: E731
        loop(model, lambda loss: strategy.backward(loss, model), step, share)
        return whole_weights(strategy, model)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_assigned_counts(worlds: Any, stage: int) -> None:
    for weights in worlds(2).run(trained, stage):
        oracle.assert_same_weights(weights, plain(), 1e-5)


def changed_meanwhile(stage: int) -> str:
    with get_strategy("deepspeed", stage=stage) as strategy:
        model, optimizer = set_up(strategy, Net, sgd)
        strategy.backward(mean_squares(model, models.share_of(strategy, models.batches("plain", 1, _BATCH)[0])), model)
        doubled = strategy.unwrap(model)[0].bias.grad * 2
        for part in optimizer.param_groups[0]["params"]:
            part.grad.zero_()
        strategy.unwrap(model)[0].bias.grad = doubled
        with pytest.raises(SetupError) as error:
            strategy.optimizer_step(optimizer)
        return str(error.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_was_computed_from_other_values_is_refused(worlds: Any, stage: int) -> None:
    for message in worlds(2).run(changed_meanwhile, stage):
        assert "put into .grad of '0.bias'" in message
