"""Steps that users take by ``optimizer.step()``, which are the strategy's, too."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shard_core.errors import SetupError

if TYPE_CHECKING:
    import torch

_STEP = "step"


class RoutedStep:
    """Routes an optimizer's ``step`` to what steps it under a strategy; a copy of the optimizer has its class's again.

    Schedulers count steps by a function of theirs in the same place, beneath this one or around it.

    Args:
        optimizer: The user's.
        route: A method, held weakly: an optimizer may outlive a strategy. Called in the place of ``step`` with the
            optimizer, with what that was, and with what the user has passed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, route: Callable[..., Any]) -> None:
        self._optimizer = optimizer
        self._route = weakref.WeakMethod(route)
        self._before = vars(optimizer).get(_STEP)
        self._step = getattr(optimizer, _STEP)
        self._inside = self._removed = False

        @functools.wraps(self._step)
        def routed(mine: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            route = None if self._removed else self._route()
            return self._step(*args, **kwargs) if route is None else route(mine, self._take, *args, **kwargs)

        # A method, for schedulers read its ``__func__``.
        self._routed = vars(optimizer)[_STEP] = types.MethodType(routed, optimizer)
        self._guard = optimizer.register_step_pre_hook(self._check)

    def remove(self) -> None:
        """Restore ``step``; where a scheduler's function has come around it, have that call what was there before."""
        self._removed = True
        self._guard.remove()
        if vars(self._optimizer).get(_STEP) is not self._routed:
            return
        if self._before is None:
            del vars(self._optimizer)[_STEP]
        else:
            vars(self._optimizer)[_STEP] = self._before

    def _take(self, *args: Any, **kwargs: Any) -> Any:
        before, self._inside = self._inside, True
        try:
            return self._step(*args, **kwargs)
        finally:
            self._inside = before

    def _check(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Refuse a step that was not routed: by the method of the class, or by one that was read before setup."""
        if not self._inside and self._route() is not None:
            raise SetupError(
                f"{type(optimizer).__name__}.step was called past the strategy, which makes gradients final first; "
                "call optimizer.step() of the optimizer that was set up, or strategy.optimizer_step(optimizer)."
            )
