"""Layers and parameters that are added after setup are refused by name at stage 3, before anything fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from words import WORDS, Words, refused_step, sgd

from shard_core import get_strategy
from shard_core.testing import set_up


def add_layer(model: Any) -> None:
    model.extra = nn.Linear(4, 4)


def add_unused(model: Any) -> None:
    model.other = nn.Linear(4, 4).requires_grad_(False)


def add_parameter(model: Any) -> None:
    model.first.scale = nn.Parameter(torch.ones(4))


def drop_added(model: Any) -> None:
    model.extra = None
    vars(model)["_modules"].pop("other", None)
    if hasattr(model.first, "scale"):
        del model.first.scale


ADDED = {each.__name__: each for each in (add_layer, add_unused, add_parameter)}


def changed(hand: str, when: str, threshold: int) -> tuple[str, str, bool]:
    """Change a module at some time of a step; return when that was refused and how, and whether a weight has moved."""
    with get_strategy("deepspeed_stage_3", param_persistence_threshold=threshold) as strategy:
        model, optimizer = set_up(strategy, Words, sgd)
        strategy.backward(model(WORDS).square().mean(), model)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
        before = strategy.module_state_dict(model)
        at, message = refused_step(strategy, model, optimizer, ADDED[hand], when)
        drop_added(model)
        after = strategy.module_state_dict(model)
        moved = any(not torch.equal(each, before[name]) for name, each in after.items())
        optimizer.zero_grad()
        strategy.backward(model(WORDS).square().mean(), model)  # goes on
        strategy.optimizer_step(optimizer)
        return at, message, moved


@pytest.mark.parametrize("threshold", [0, 1000])
@pytest.mark.parametrize("when", ["forward", "backward", "step"])
@pytest.mark.parametrize("hand", ADDED)
def test_what_is_added_is_refused_at_stage_3(worlds: Any, hand: str, when: str, threshold: int) -> None:
    name = {"add_layer": "extra.weight", "add_unused": "other.weight", "add_parameter": "first.scale"}[hand]
    for at, message, moved in worlds(2).run(changed, hand, when, threshold):
        assert at == when
        assert message.startswith(f"{name!r} was put into the module after setup"), message
        assert not moved


def evaluated_with(threshold: int) -> torch.Tensor:
    with get_strategy("deepspeed_stage_3", param_persistence_threshold=threshold) as strategy:
        model, _ = set_up(strategy, Words, sgd)
        with torch.no_grad():
            plain = model(WORDS)
            model.extra = nn.Linear(4, 4)
            nn.init.eye_(model.extra.weight)
            nn.init.zeros_(model.extra.bias)
            return model(WORDS) - plain


@pytest.mark.parametrize("threshold", [0, 1000])
def test_added_layers_are_evaluated(worlds: Any, threshold: int) -> None:
    for difference in worlds(2).run(evaluated_with, threshold):
        assert float(difference.abs().max()) < 1e-6
