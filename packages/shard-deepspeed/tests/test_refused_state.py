"""What cannot be taken in is refused by name, and before anything has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shard_core import SetupError, get_strategy
from shard_core.testing import models, set_up


def load_what_does_not_fit(threshold: int) -> tuple[bool, list[str]]:
    with get_strategy("deepspeed_stage_3", param_persistence_threshold=threshold) as strategy:
        model, _ = set_up(strategy, "plain", "sgd")
        before = strategy.module_state_dict(model)
        whole = {name: torch.zeros_like(value) for name, value in models.make("plain").state_dict().items()}
        messages = []
        for values, assign in (({**whole, "first.weight": torch.zeros(3, 1)}, False), (whole, True)):
            try:
                strategy.unwrap(model).load_state_dict(values, assign=assign)
            except SetupError as error:
                messages.append(str(error))
        return all(
            torch.equal(value, before[name]) for name, value in strategy.module_state_dict(model).items()
        ), messages


@pytest.mark.parametrize("threshold", [0, 20])
def test_a_refused_load_has_changed_nothing(worlds: Any, threshold: int) -> None:
    for unchanged, messages in worlds(2).run(load_what_does_not_fit, threshold):
        assert len(messages) == 2
        assert all(message.startswith("load_state_dict() was given 'first.weight'") for message in messages)
        assert "in the shape (3, 1)" in messages[0]
        assert unchanged


def adagrad_that_comes_late() -> str:
    with get_strategy("deepspeed_stage_3", param_persistence_threshold=0) as strategy:
        model = strategy.setup_module(models.make("plain"))
        optimizer = torch.optim.Adagrad(model.parameters())
        try:
            strategy.setup_optimizer(optimizer)
        except SetupError as error:
            return str(error)
        return "no error"


def test_state_of_what_was_emptied_is_refused(worlds: Any) -> None:
    for message in worlds(2).run(adagrad_that_comes_late):
        assert message.startswith("this Adagrad has made its state 'sum' of parameters whose values stage 3 has spread")
