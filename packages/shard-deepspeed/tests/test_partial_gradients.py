"""Who changes a part of a gradient in the module is told what works instead, and that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import set_up


def assign_row(weight: Any) -> None:
    weight.grad[0] = 0


def scale_rows(weight: Any) -> None:
    weight.grad[:2].mul_(0.5)


def fill_column(weight: Any) -> None:
    weight.grad.data[:, 1].fill_(0)


def mask(weight: Any) -> None:
    weight.grad *= torch.ones(4, 6)


def put_masked(weight: Any) -> None:
    weight.grad = torch.ones(4, 6)


HANDS: dict[str, Callable[[Any], None]] = {
    each.__name__: each for each in (assign_row, scale_rows, fill_column, mask, put_masked)
}


def linear() -> nn.Module:
    return nn.Linear(6, 4)


def changed(hand: str, options: dict[str, Any]) -> str:
    with get_strategy("deepspeed", **options) as strategy:
        model, optimizer = set_up(strategy, linear, "sgd")
        strategy.backward(model(torch.ones(2, 6)).sum(), model)
        try:
            HANDS[hand](model.weight)
            strategy.optimizer_step(optimizer)
        except SetupError as error:
            return str(error)
        return "stepped"


OPTIONS: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "away": {"stage": 3, "param_persistence_threshold": 0},
}


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("hand", HANDS)
def test_what_works_is_named(worlds: Any, hand: str, how: str) -> None:
    if (hand, how) == ("put_masked", "away"):
        pytest.skip("torch itself refuses a gradient of another shape than the parameter has just then")
    for message in worlds(2).run(changed, hand, OPTIONS[how]):
        assert "parameter.register_hook(change)" in message, message
        assert (hand == "put_masked") or "strategy.module_gradients(model)" in message, message


def without_first_row(gradient: torch.Tensor) -> torch.Tensor:
    assert gradient.shape == (4, 6)
    return torch.cat([torch.zeros_like(gradient[:1]), gradient[1:]])


def hooked(options: dict[str, Any], late: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Train by two micro-batches on each rank; return the gradient and how the weight has moved."""
    with get_strategy("deepspeed", **options) as strategy:
        module = linear()
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        if not late:
            module.weight.register_hook(without_first_row)
        model, _ = strategy.setup_module_and_optimizers(module, [optimizer])
        if late:
            model.weight.register_hook(without_first_row)
        before = strategy.broadcast(strategy.module_state_dict(model))["weight"].clone()
        for _ in range(2):
            strategy.backward(model(torch.full((1, 6), 1.0 + strategy.global_rank)).sum(), model)
        gradient = strategy.broadcast(strategy.module_gradients(model))["weight"]
        strategy.optimizer_step(optimizer)
        return gradient, before - strategy.broadcast(strategy.module_state_dict(model))["weight"]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("how", OPTIONS)
def test_hooks_change_parts_of_gradients(worlds: Any, how: str, late: bool) -> None:
    expected = torch.full((4, 6), 3.0)
    expected[0] = 0
    for gradient, moved in worlds(2).run(hooked, OPTIONS[how], late):
        torch.testing.assert_close(gradient, expected)
        torch.testing.assert_close(moved, expected)
