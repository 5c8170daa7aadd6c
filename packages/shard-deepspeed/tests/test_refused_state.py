"""What cannot be taken in is refused by name, and before anything has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

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


def assign() -> tuple[str, bool]:
    with get_strategy("deepspeed_stage_3") as strategy:
        model, _ = set_up(strategy, "plain", "sgd")
        before = strategy.module_state_dict(model)
        with pytest.raises(SetupError) as error:
            strategy.unwrap(model).load_state_dict(models.make("plain").state_dict(), assign=True)
        after = strategy.module_state_dict(model)
        return str(error.value), all(torch.equal(value, before[name]) for name, value in after.items())


def test_parameters_are_not_exchanged_where_they_are_whole(worlds: Any) -> None:
    for message, unchanged in worlds(2).run(assign):
        assert "'first.weight' to assign" in message
        assert unchanged


class Stranger(torch.optim.Adagrad):
    """An optimizer whose first state may depend on what is in none of its groups."""


def come_late() -> list[str]:
    messages = []
    with get_strategy("deepspeed_stage_3", param_persistence_threshold=0) as strategy:
        model = strategy.setup_module(models.make("plain"))
        groups = [{"params": [each]} for each in model.parameters()]
        for optimizer in (Stranger(model.parameters()), torch.optim.SGD(groups)):
            held = [id(each) for group in optimizer.param_groups for each in group["params"]]
            try:
                strategy.setup_optimizer(optimizer)
            except SetupError as error:
                messages.append(str(error))
            assert held == [id(each) for group in optimizer.param_groups for each in group["params"]]
    return messages


def test_what_was_made_of_emptied_parameters_is_refused_where_it_cannot_be_made_again(worlds: Any) -> None:
    for state, groups in worlds(2).run(come_late):
        assert state.startswith("this Stranger has made its state 'sum' of parameters whose values stage 3 has spread")
        assert groups.startswith("this SGD has several groups of parameters that setup has flattened")


def complex_parameter(stage: int) -> str:
    with get_strategy("deepspeed", stage=stage) as strategy:
        module = nn.Module()
        module.register_parameter("turned", nn.Parameter(torch.full((2,), 1 + 2j)))
        with pytest.raises(SetupError) as refusal:
            strategy.setup_module(module)
        return str(refusal.value)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_complex_parameters_are_refused(worlds: Any, stage: int) -> None:
    for refusal in worlds(2).run(complex_parameter, stage):
        assert "'turned' is complex" in refusal
