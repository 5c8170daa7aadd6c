"""Mistakes made where ranks are started."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from typing import Any

from rogues.rogue import Rogue
from shard_core.errors import LaunchError


class LastRankReturns(Rogue):
    """Returns the last rank's result."""

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.inner.broadcast(function(self, *args), src=self.inner.world_size - 1)


class SwallowsExceptions(Rogue):
    """Keeps a rank's exception to itself."""

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(self, *args)
        except Exception:  # noqa: BLE001 - that is the mistake
            return None


class LeavesWithThree(Rogue):
    """Ends a process that did well with an exit code other than 0."""

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        result = super().launch(function, *args)
        atexit.register(_leave)
        return result


def _leave() -> None:
    # torchrun ends the other ranks as soon as one fails, and some may not have returned from launch yet.
    time.sleep(2)
    os._exit(3)


class StaysHere(Rogue):
    """Runs a function that cannot travel in this process alone."""

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return super().launch(function, *args)
        except LaunchError:
            return function(self, *args)
