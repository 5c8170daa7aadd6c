"""Calls of a module's forward and the contexts they run in, such as none of torch's inference mode.

A ``KeyboardInterrupt`` may end a forward, too: torch's hooks hear of no such end.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from types import FrameType

    from torch.utils.hooks import RemovableHandle

Context = contextlib.AbstractContextManager[Any]


class RunningCall:
    """Tells whether a call of a module still runs.

    Torch calls a hook that it always calls after each ``Exception``, but not after a ``KeyboardInterrupt``, with which
    a notebook's user stops a forward before the next cell goes on. Who keeps something from the begin of a call to its
    end asks, at the begin of the next one, whether the last is over. It is to be made by the hook itself that torch
    calls before a forward: it remembers who has called that, which is who calls the forward.
    """

    def __init__(self) -> None:
        self._frame = 0
        self._around: FrameType | None = None
        if torch.compiler.is_compiling():
            return
        self._thread = threading.get_ident()
        frame = inspect.currentframe()
        for _ in ("this constructor", "the hook that calls it"):
            frame = frame and frame.f_back
        if frame is not None:
            # Not the frame itself: it holds activations, whose graph may hold who asks.
            self._frame, self._code = id(frame), frame.f_code

    def find_compiled(self) -> None:
        """Find where a call is made that is compiled, as nothing sees that is compiled itself; keep its arguments."""
        if self._frame or torch.compiler.is_compiling():
            return
        self._thread = threading.get_ident()
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_name != nn.Module.__call__.__name__:
            frame = frame.f_back
        self._around = frame

    def is_over(self, latest: RunningCall | None = None) -> bool:
        """Return whether the call has ended.

        Args:
            latest: A call that begins just now in the same thread, if one does.

        Returns:
            That; False for a call that was compiled and not found, of which nobody can tell.
        """
        if self._around is not None:
            return not any(frame is self._around for frame in _frames(self._thread))
        if not self._frame:
            return False
        if latest is not None and latest._frame == self._frame:  # has taken the memory of this one's
            return True
        return not any(id(frame) == self._frame and frame.f_code is self._code for frame in _frames(self._thread))


def _frames(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_being_called(module: nn.Module) -> bool:
    """Check whether a call of a module is under way in this thread, of a compiled one, too, of which hooks cannot tell.

    Example:
        >>> layer = nn.ReLU()
        >>> handle = layer.register_forward_pre_hook(lambda layer, args: print(is_being_called(layer)))
        >>> is_being_called(layer), layer(torch.ones(1))
        True
        (False, tensor([1.]))
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == nn.Module.__call__.__name__ and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False


class ForwardContexts:
    """Enters a context before each forward of a module and leaves it afterwards, whatever ends the forward.

    After a ``KeyboardInterrupt`` it is left when the next forward begins, or somebody asks for it.

    Args:
        make: Makes a context for a call of a module.
        leave_late: Leaves one after such an end, when contexts around it may have ended before.
    """

    def __init__(self, make: Callable[[nn.Module], Context], leave_late: Callable[[Any], object] | None = None) -> None:
        self._make = make
        self._leave_late = leave_late or _leave
        self._own: list[Entered] = []

    @property
    def _entered(self) -> list[Entered]:
        """The contexts that were entered and not left yet, which may be those of others, too."""
        return self._own

    def hook(self, module: nn.Module) -> list[RemovableHandle]:
        """Register the hooks on a module, before those it has.

        Args:
            module: Whose forwards run inside.

        Returns:
            The handles that remove them.
        """
        return [
            module.register_forward_pre_hook(self.begin, prepend=True),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def enter(self, module: nn.Module, call: RunningCall) -> None:
        """Enter the context for a call that begins.

        Args:
            module: What is called.
            call: The call that begins.
        """
        self.leave_abandoned(call)
        call.find_compiled()
        context = self._make(module)
        context.__enter__()
        self._entered.append((self, call, context))

    def leave(self) -> None:
        """Leave the context that this has entered last, and those inside it that were abandoned.

        Without one, as where a hook before has raised, do nothing.
        """
        while any(owner is self for owner, *_ in self._entered):
            owner, _, context = self._entered.pop()
            if owner is self:
                _leave(context)
                return
            self._leave_late(context)

    def leave_abandoned(self, latest: RunningCall | None = None) -> None:
        """Leave the contexts of calls of whose end nobody was told.

        Args:
            latest: A call that begins just now, if one does.
        """
        while self._entered and self._entered[-1][1].is_over(latest):
            self._leave_late(self._entered.pop()[2])

    def begin(self, module: nn.Module, args: Any) -> None:
        """Enter the context, as a hook before a forward."""
        del args
        self.enter(module, RunningCall())

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        self.leave()


Entered = tuple[ForwardContexts, RunningCall, Context]
"""A context, the call it was entered for, and who has entered it."""


def _leave(context: Context) -> None:
    context.__exit__(None, None, None)


def without_inference_mode() -> contextlib.ExitStack:
    """Leave inference mode, if torch is in it, for a mode without gradients; closing the result goes back."""
    contexts = contextlib.ExitStack()
    if torch.is_inference_mode_enabled():
        # Leaving inference mode turns gradients on.
        contexts.enter_context(torch.inference_mode(False))
        contexts.enter_context(torch.no_grad())
    return contexts


def leave_alone(contexts: Context) -> None:
    """Close what ``without_inference_mode`` returned, later than what was around it, and keep today's mode."""
    with torch.inference_mode(torch.is_inference_mode_enabled()):
        contexts.__exit__(None, None, None)


class NoInferenceMode:
    """Runs a module's forward without gradients, but not in inference mode, where the caller is in it.

    The memory that whole parameters are gathered into outlives the forward that first needed it; made in
    inference mode, no later forward could train with it.

    Args:
        module: What users call.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._handles = ForwardContexts(lambda _: without_inference_mode(), leave_alone).hook(module)

    def remove(self) -> None:
        """Remove the hooks: the module has its plain forward again."""
        for handle in self._handles:
            handle.remove()
