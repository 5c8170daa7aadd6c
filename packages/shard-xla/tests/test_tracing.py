"""An optimizer's step is traced in few calls, and computes what it would have computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.overrides import TorchFunctionMode
from xla_environments import HASTY, spread_over

from shard_core import get_strategy
from shard_core.testing import models, set_up, whole_weights

#: Settings of AdamW, and whether it then takes lists.
SETTINGS: list[tuple[dict[str, Any], bool]] = [({}, True), ({"foreach": False}, False)]
#: Torch has no such step in lists for this device.
ON_THE_DEVICE: tuple[dict[str, Any], bool] = ({"capturable": True}, False)


class Operations(TorchFunctionMode):
    """Notes the names of what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


class AdamW:
    """Makes the optimizer, wherever it is sent to."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def __call__(self, module: nn.Module) -> optim.Optimizer:
        return optim.AdamW(module.parameters(), lr=1e-2, **self.settings)


def train(name: str, settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], set[Any], bool]:
    """Return the weights, the settings that hooks on the step saw, and whether the step took lists."""
    seen: set[Any] = set()
    with get_strategy(name, accelerator="xla") as strategy:
        model, optimizer = set_up(strategy, "plain", AdamW(settings))
        optimizer.register_step_pre_hook(lambda stepped, *_: seen.add(stepped.param_groups[0]["foreach"]))
        optimizer.register_step_post_hook(lambda stepped, *_: seen.add(stepped.param_groups[0]["foreach"]))
        for batch in models.batches("plain", 3, 12):
            strategy.backward(model(*models.share_of(strategy, batch)), model)
            with Operations() as operations:
                strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return whole_weights(strategy, model), seen, "_foreach_addcdiv_" in operations.names


@pytest.mark.parametrize(
    ("name", "environment", "cases"),
    [("xla_fsdp", HASTY, SETTINGS), ("xla_spmd", spread_over(4), [*SETTINGS, ON_THE_DEVICE])],
)
def test_a_step_takes_lists_where_that_was_left_open(
    worlds: Any, name: str, environment: dict[str, str], cases: list[tuple[dict[str, Any], bool]]
) -> None:
    answers = []
    for settings, lists in cases:
        ((weights, seen, took_lists),) = worlds(1, environment).run(train, name, settings, timeout=240)
        assert took_lists == lists, settings
        assert seen == {settings.get("foreach")}
        answers.append(weights)
    left_open, one_by_one, *_ = answers
    assert all(torch.equal(left_open[key], value) for key, value in one_by_one.items())


def choosing_late() -> list[bool]:
    """Step with the choice left open, taken, and left open again."""
    took_lists = []
    with get_strategy("xla_fsdp", accelerator="xla") as strategy:
        model, optimizer = set_up(strategy, "plain", AdamW({}))
        for settings in ({}, {"foreach": False}, {"foreach": None}):
            optimizer.param_groups[0].update(settings)
            strategy.backward(model(*models.share_of(strategy, models.batches("plain", 1, 12)[0])), model)
            with Operations() as operations:
                strategy.optimizer_step(optimizer)
            took_lists.append("_foreach_addcdiv_" in operations.names)
            optimizer.zero_grad()
    return took_lists


def test_a_choice_that_comes_later_is_kept(worlds: Any) -> None:
    assert worlds(1, HASTY).run(choosing_late, timeout=240) == [[True, False, True]]
