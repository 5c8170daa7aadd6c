"""Steps that users take by ``optimizer.step()``, which are the strategy's, too."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shard_core.errors import SetupError

if TYPE_CHECKING:
    import torch

_STEP = "step"
_CLOSURE = "closure"


class RoutedStep:
    """Routes an optimizer's ``step`` to what steps it under a strategy; a copy of the optimizer has its class's.

    Schedulers count steps by a function of theirs in the same place, beneath this one or around it, and users may put
    one around it, too: each runs once in a step.

    Args:
        optimizer: The user's.
        route: A method that steps the optimizer, with a closure or None, by calling its ``step`` inside ``opened``. It
            is held weakly: an optimizer may outlive a strategy.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, route: Callable[..., object]) -> None:
        self._optimizer = optimizer
        self._route = weakref.WeakMethod(route)
        self._before = vars(optimizer).get(_STEP)
        self._step = getattr(optimizer, _STEP)
        self._open = self._removed = False
        self._given: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        self._returned: Any = None

        @functools.wraps(getattr(self._step, "__func__", self._step))
        def routed(mine: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if mine is not self._optimizer:
                return getattr(type(mine), _STEP)(mine, *args, **kwargs)
            if self._is_free():
                return self._take(*args, **kwargs)
            return self._step_by_hand(*args, **kwargs)

        # A method, for schedulers read its ``__func__``.
        self._routed = vars(optimizer)[_STEP] = types.MethodType(routed, optimizer)
        self._guard = optimizer.register_step_pre_hook(self._check)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Return a context for an engine, in which ``step`` is the optimizer's own."""
        before, self._open = self._open, True
        try:
            yield
        finally:
            self._open = before

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

    def _is_free(self) -> bool:
        return self._open or self._removed or self._route() is None

    def _step_by_hand(self, *args: Any, **kwargs: Any) -> Any:
        """Have the strategy step, and the optimizer's own step be given what the user has given; return its result."""
        closure = args[0] if args else kwargs.get(_CLOSURE)
        around, vars(self._optimizer)[_STEP] = vars(self._optimizer)[_STEP], self._routed  # what is around it has begun
        self._given = args, kwargs
        route = self._route()
        assert route is not None
        try:
            route(self._optimizer, closure if callable(closure) else None)
            return self._returned
        finally:
            self._given = self._returned = None
            if vars(self._optimizer).get(_STEP) is self._routed:
                vars(self._optimizer)[_STEP] = around

    def _take(self, *args: Any, **kwargs: Any) -> Any:
        """Step as the class does: as the engine says, or as the user who has begun it, with the engine's closure."""
        if self._given is None:
            return self._step(*args, **kwargs)
        closure = args[0] if args else kwargs.get(_CLOSURE)
        args, kwargs = self._given[0], {**self._given[1]}
        if closure is not None and args:
            args = closure, *args[1:]
        elif closure is not None:
            kwargs[_CLOSURE] = closure
        self._returned = self._step(*args, **kwargs)
        return self._returned

    def _check(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Refuse a step that was not routed: by the method of the class, or by one that was read before setup."""
        if optimizer is self._optimizer and not self._is_free():
            raise SetupError(
                f"the step of {type(optimizer).__name__} was called past the strategy, which makes gradients final "
                "first; call optimizer.step() of the optimizer that was set up, or strategy.optimizer_step(optimizer)."
            )

    def __deepcopy__(self, memo: object) -> RoutedStep:
        """Return itself: a copy of the optimizer is none that it routes."""
        return self
