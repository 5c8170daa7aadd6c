"""Hooks on a set-up module: its forwards run in the precision's context, and calls past its forward are refused."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.parametrize import ParametrizationList

from shard_core._versions import in_backward
from shard_core.errors import MissingCapability
from shard_core.forward_calls import Entered, ForwardContexts, RunningCall

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec

    from torch.utils.hooks import RemovableHandle

    from shard_core.precision.interface import Precision

    _Given = ParamSpec("_Given")


class ForwardPrecision:
    """Casts the inputs of a module's forward and enters the precision's context around it.

    It hooks into the module instead of wrapping it, so that names stay the user's own.

    Args:
        module: The user's own, which ``unwrap`` returns too.
        precision: Which dtype where.
        device_type: Where the module runs.
    """

    def __init__(self, module: torch.nn.Module, precision: Precision, device_type: str) -> None:
        self._precision = precision
        make = functools.partial(_PrecisionContext, precision, device_type)
        self._contexts = _PrecisionContexts(lambda _: make(), _PrecisionContext.leave_late)
        self._handles: list[RemovableHandle] = []
        if not precision.plain_forward:
            self._handles = [
                module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def _enter(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        _untraced(self._contexts.enter)(module, RunningCall())
        return self._precision.convert_input(args), self._precision.convert_input(kwargs)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        _untraced(self._contexts.leave)()

    def leave_abandoned(self) -> None:
        """Leave the context of a forward that a ``KeyboardInterrupt`` has ended, of which torch's hooks do not hear."""
        self._contexts.leave_abandoned()

    def remove(self) -> None:
        """Remove the hooks: the module has its plain forward again."""
        self.leave_abandoned()
        for handle in self._handles:
            handle.remove()


class _PrecisionContext:
    """A precision's context, around whose end others may have been left and entered.

    Args:
        precision: Whose.
        device_type: Where the module runs.
    """

    def __init__(self, precision: Precision, device_type: str) -> None:
        self._context, self._device_type = precision.forward_context(device_type), device_type

    def __enter__(self) -> None:
        self._context.__enter__()
        self._made = self._autocast()

    def __exit__(self, *exception: object) -> None:
        self._context.__exit__(None, None, None)

    def leave_late(self) -> None:
        """Leave it; autocast stays as it is where others have changed it since."""
        enabled, dtype = self._autocast()
        if (enabled, dtype) == self._made:
            self.__exit__()
        else:
            with torch.autocast(self._device_type, dtype=dtype, enabled=enabled):
                self.__exit__()

    def _autocast(self) -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(self._device_type), torch.get_autocast_dtype(self._device_type)


class _InThread(threading.local):
    """What was entered in this thread, where alone autocast is on, and not left yet."""

    def __init__(self) -> None:
        self.contexts: list[Entered] = []


_ENTERED = _InThread()


class _PrecisionContexts(ForwardContexts):
    """The contexts of all modules' forwards: the innermost is left first, whichever module's it is."""

    @property
    def _entered(self) -> list[Entered]:
        return _ENTERED.contexts


def _untraced(function: Callable[_Given, None]) -> Callable[_Given, None]:
    """Return a function that torch's compiler calls as it is: it traces no context that is left in another call.

    The graph of a module that was compiled in place breaks there, and its forward is still one.
    """
    # Only where there is a compiler at work: importing it takes seconds.
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


class ForwardOnly:
    """Refuses calls of what is inside a set-up module while its own forward is not running.

    Hooks on the submodules that hold parameters cost two to three microseconds a call. What is compiled is not watched,
    and neither are calls without gradients where every rank has the whole parameters.

    Args:
        strategy: The strategy's name, for the message.
        kind: What the user calls the module's class.
        module: The user's module.
        called: What the user calls.
        sharded: Whether a rank has only parts of the parameters.
    """

    def __init__(
        self, strategy: str, kind: str, module: torch.nn.Module, called: torch.nn.Module, *, sharded: bool
    ) -> None:
        self._strategy = strategy
        self._kind = kind
        self._running: list[RunningCall] = []
        self._sharded = sharded
        watched = [part for part in module.modules() if part is not called and self._watches(part)]
        # By identity: hooks are copied along with a module, and a copy of it is not to be watched.
        self._watched = frozenset(map(id, watched))
        self._handles: list[RemovableHandle] = [
            called.register_forward_pre_hook(self._enter),
            called.register_forward_hook(self._leave, always_call=True),
            *(part.register_forward_pre_hook(self._check, prepend=True) for part in watched),
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without calls and the hooks, which lead to the strategy, where a module is copied."""
        return {**self.__dict__, "_handles": [], "_running": []}

    def _watches(self, part: torch.nn.Module) -> bool:
        # A parametrization runs when somebody looks at the parameter.
        if isinstance(part, ParametrizationList):
            return False
        return any(self._sharded or parameter.requires_grad for parameter in part.parameters(recurse=False))

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        del module, args
        latest = RunningCall()
        self._running = [*(call for call in self._running if not call.is_over(latest)), latest]

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        if self._running:  # a hook before ours may have raised
            self._running.pop()

    def _check(self, module: torch.nn.Module, args: Any) -> None:
        del args
        if torch.compiler.is_compiling() or self._running:
            return
        # Activation checkpointing calls again what ran before.
        if id(module) not in self._watched or in_backward() or not (self._sharded or torch.is_grad_enabled()):
            return
        cure = "" if self._sharded else ", or use torch.no_grad() where no gradient is wanted"
        raise MissingCapability(
            f"strategy {self._strategy!r} does not promise ENTRY_METHODS: a {type(module).__name__} inside "
            f"{self._kind} was called, but not from the forward of the module that setup returned; call that module "
            f"and let its forward dispatch to other methods{cure}."
        )

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
