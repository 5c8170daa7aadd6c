"""What cannot be taken in is refused by name, and before anything has changed."""

from __future__ import annotations

from typing import Any

import torch

from shard_core import SetupError, get_strategy
from shard_core.testing import models, set_up


def load_past_what_is_whole() -> tuple[bool, str]:
    with get_strategy("deepspeed_stage_3", param_persistence_threshold=20) as strategy:
        model, _ = set_up(strategy, "plain", "sgd")
        before = strategy.module_state_dict(model)
        whole = {name: torch.zeros_like(value) for name, value in models.make("plain").state_dict().items()}
        message = ""
        try:
            strategy.unwrap(model).load_state_dict(whole)
        except SetupError as error:
            message = str(error)
        return all(
            torch.equal(value, before[name]) for name, value in strategy.module_state_dict(model).items()
        ), message


def test_a_refused_load_has_changed_nothing(worlds: Any) -> None:
    for unchanged, message in worlds(2).run(load_past_what_is_whole):
        assert message.startswith("load_state_dict() was given")
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
