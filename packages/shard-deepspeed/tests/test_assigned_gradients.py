"""What is put in the place of a gradient that stands in parts counts where it was computed of that, else is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import oracle, set_up


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 5))


def assign_anothers(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model[0].bias.grad = model[1].bias.grad.clone()


def assign_and_change_parts(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model[0].bias.grad = 0.5 * model[0].bias.grad
    for group in optimizer.param_groups:
        for part in group["params"]:
            part.grad.mul_(3)


def assign_of_thrown_away(model: Any, optimizer: torch.optim.Optimizer) -> None:
    halved = 0.5 * model[0].bias.grad
    optimizer.zero_grad()
    model[0].bias.grad = halved


def read(model: Any, optimizer: torch.optim.Optimizer) -> None:
    (0.5 * model[0].bias.grad).sum()


Hand = Callable[[Any, torch.optim.Optimizer], None]
HANDS: list[Hand] = [assign_anothers, assign_and_change_parts, assign_of_thrown_away, read]


def refused(stage: int) -> list[str]:
    """Do what cannot count; return what is said of each."""
    messages = []
    with get_strategy("deepspeed", stage=stage) as strategy:
        model, optimizer = set_up(strategy, layers, "sgd")
        before = strategy.module_state_dict(model)
        for hand in HANDS:
            strategy.backward(model(torch.ones(2, 6)).sum(), model)
            try:
                hand(model, optimizer)
                strategy.optimizer_step(optimizer)
                messages.append(f"{hand.__name__} stepped")
            except SetupError as error:
                messages.append(str(error))
            model.zero_grad()
        after = strategy.module_state_dict(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())
    return messages


@pytest.mark.parametrize("stage", [1, 3])
def test_what_was_computed_of_another_gradient_is_refused(worlds: Any, stage: int) -> None:
    for *assigned, computed in worlds(2).run(refused, stage):
        assert [message.partition(",")[0] for message in assigned] == ["a gradient was put into .grad of '0.bias'"] * 3
        assert "were read or changed in .grad" in computed


def thrown_away(stage: int, to_none: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
    """Put gradients in the place of others and throw them away; return the next, those to expect, and what is left."""
    with get_strategy("deepspeed", stage=stage) as strategy:
        model, optimizer = set_up(strategy, layers, "sgd")
        expected: dict[str, torch.Tensor] = {}
        for again in (False, True):
            strategy.backward(model(torch.ones(2, 6)).square().sum(), model)
            if not again:
                expected = strategy.module_gradients(model)
                for parameter in model.parameters():
                    parameter.grad = 0.5 * parameter.grad
                optimizer.zero_grad(set_to_none=to_none)
        found = strategy.module_gradients(model)
        for parameter in model.parameters():
            parameter.grad = 0.5 * parameter.grad
    return found, expected, any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_was_put_there_is_thrown_away_by_the_optimizer(worlds: Any, stage: int, to_none: bool) -> None:
    answers = worlds(2).run(thrown_away, stage, to_none)
    oracle.assert_same_weights(answers[0][0], answers[0][1], 1e-6)
    assert not any(left for _, _, left in answers), "teardown leaves proxies"
