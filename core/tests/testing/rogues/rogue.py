"""What every rogue is: a right strategy in a thin coat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from shard_core.strategies.ddp import DDPStrategy


class Rogue:
    """Hands everything on to the strategy inside; each rogue changes one thing about it.

    It is no ``Strategy`` and inherits nothing: what it does is all there is to judge it by.
    """

    def __init__(self, **arguments: Any) -> None:
        self.inner = DDPStrategy(**arguments)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # asked while it is unpickled, before there is one
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def __enter__(self) -> Self:
        self.inner.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.inner.__exit__(*exception)

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        if not callable(function):
            return self.inner.launch(function, *args)
        return self.inner.launch(_call_with, type(self), function, *args)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run what was launched, on its rank."""
        return function(self, *args)


def _call_with(inner: DDPStrategy, kind: type[Rogue], function: Callable[..., Any], *args: Any) -> Any:
    """Wrap the strategy again on the rank, where only the one inside has arrived."""
    rogue = kind.__new__(kind)
    rogue.__dict__["inner"] = inner
    return rogue.call(function, *args)


def parameters(optimizer: Any) -> list[Any]:
    """List what an optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
