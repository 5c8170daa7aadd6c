"""Gradients that come past the strategy's ``backward`` are never divided by the denominators of other losses."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy

INPUTS = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)


def set_up(strategy: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, _ = strategy.setup_module_and_optimizers(module, [optimizer])
    return model, optimizer


def add_sum(strategy: Any, model: nn.Module) -> None:
    strategy.backward(model(INPUTS).square().sum(), model, denominator=4)


def test_a_penalty_on_one_layer_is_refused() -> None:
    with get_strategy("single", accelerator="cpu") as strategy:
        model, optimizer = set_up(strategy)
        add_sum(strategy, model)
        model[2].weight.square().sum().backward()
        with pytest.raises(SetupError, match="has added gradients"):
            strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
        add_sum(strategy, model)
        assert strategy.optimizer_step(optimizer)


def test_steps_may_differ_in_how_they_come_to_gradients() -> None:
    """A step of ``loss.backward()`` alone, between others with denominators, is one of plain PyTorch."""
    with get_strategy("single", accelerator="cpu") as strategy:
        model, optimizer = set_up(strategy)
        for _ in range(2):
            add_sum(strategy, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            model(INPUTS).square().mean().backward()
            gradient = model[0].weight.grad.clone()
            strategy.optimizer_step(optimizer)
            assert torch.equal(model[0].weight.grad, gradient)
            optimizer.zero_grad()


def test_gradients_that_were_set_to_none_by_hand_are_forgotten() -> None:
    with get_strategy("single", accelerator="cpu") as strategy:
        model, optimizer = set_up(strategy)
        add_sum(strategy, model)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
        model(INPUTS).mean().backward()
        for parameter in model.parameters():
            parameter.grad = None
        add_sum(strategy, model)
        assert strategy.optimizer_step(optimizer)


def test_a_module_may_hold_whole_numbers() -> None:
    with get_strategy("single", accelerator="cpu") as strategy:
        module = nn.Linear(3, 1)
        module.steps = nn.Parameter(torch.zeros(1, dtype=torch.long), requires_grad=False)
        model = strategy.setup_module(module)
        add_sum(strategy, model)
        assert model.weight.grad is not None


def test_a_later_optimizer_is_refused_while_gradients_wait() -> None:
    with get_strategy("single", accelerator="cpu") as strategy:
        module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        model = strategy.setup_module(module)
        add_sum(strategy, model)
        strategy.setup_optimizer(torch.optim.SGD(module[0].parameters(), lr=0.1))
        with pytest.raises(SetupError, match="while gradients wait to be divided"):
            strategy.setup_optimizer(torch.optim.SGD(module[1].parameters(), lr=0.1))


def test_a_strategy_that_was_dropped_lets_go_of_its_module() -> None:
    def train() -> weakref.ref[nn.Module]:
        strategy = get_strategy("single", accelerator="cpu")
        strategy.setup_environment()
        model, optimizer = set_up(strategy)
        add_sum(strategy, model)
        strategy.optimizer_step(optimizer)
        return weakref.ref(model)

    module = train()
    gc.collect()
    assert module() is None
