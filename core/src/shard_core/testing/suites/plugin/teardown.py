"""What a strategy leaves behind: after teardown nothing of it holds what was trained."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from shard_core.errors import ShardError
from shard_core.testing import models
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.suites.training.runs import BATCH
from shard_core.testing.training import set_up

if TYPE_CHECKING:
    from shard_core.strategy import Strategy
    from shard_core.testing.strategy_under_test import Ranks, Subject

_MODULES = 3
_SECONDS = 5.0
"""What threads of an engine compute with may be held until they have ended."""


class Teardown(Suite):
    """What was trained ends with the run."""

    @pytest.mark.parametrize("how", ["stepped", "two forwards", "pending", "shown"])
    @promise(after=("averages_gradients",), every_size=False)
    def test_teardown_lets_go_of_the_module(self, ranks: Ranks, how: str) -> None:
        """After teardown a module is freed with the user's last name for it, and its optimizer with all that it keeps.

        Usual cause:
            A hook, a cache or a registry of a library that outlives the strategy leads to the module; a sweep in one
            process keeps the memory of every model it has tried.
        """
        for held in ranks.run(train_and_leave, how):
            assert not any(held), f"of modules and optimizers, one after the other, the strategy still holds {held}"


def train_and_leave(subject: Subject, how: str) -> list[bool]:
    """Train modules, each under a strategy of its own; return which of them, and of optimizers, are held afterwards."""
    trained: list[weakref.ref[Any]] = []
    for _ in range(_MODULES):
        with subject.strategy() as strategy:
            trained += _trained(strategy, how)
        del strategy
    end = time.monotonic() + _SECONDS
    while _held(trained) and time.monotonic() < end:
        time.sleep(0.1)
    return [each() is not None for each in trained]


def _held(trained: list[weakref.ref[Any]]) -> bool:
    """Collect garbage and return whether something is held all the same."""
    gc.collect()
    return any(each() is not None for each in trained)


def _trained(strategy: Strategy, how: str) -> list[weakref.ref[Any]]:
    """Train a module in one way and return weak references to it and its optimizer."""
    model, optimizer = set_up(strategy, "plain", "sgd")
    first, second = (models.share_of(strategy, each) for each in models.batches("plain", 2, BATCH))
    loss = model(*first) + model(*second) if how == "two forwards" else model(*first)
    with contextlib.suppress(ShardError), strategy.no_backward_sync(model, enabled=how == "pending"):
        strategy.backward(loss, model)
    if how != "pending":
        strategy.optimizer_step(optimizer)
    if how == "shown":
        strategy.module_state_dict(model)
        strategy.optimizer_state_dict(optimizer)
    return [weakref.ref(strategy.unwrap(model)), weakref.ref(optimizer)]
