"""Uneven calls: what the losses of some ranks come to alone, where others would wait for it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shard_core.backend import check_called_alike, inside_objects, is_compiled

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from shard_core.backend import Collectives


class UnevenCalls:
    """Keeps ranks from waiting for each other for good where only some of them come to a layer.

    Stage 3 gathers parameters as layers are called, forward and backward; stages 2 and 3, and 1 with ``overlap_comm``,
    send what a bucket holds as soon as a gradient finds no room in it. So ranks compare what they come to before that,
    in one small message. What is left in the bucket is sent after the backward, when ranks have compared all of it.

    Args:
        module: The user's.
        collectives: Of all ranks.
        gathers: Whether layers gather their parameters as they are called.
        sends: Whether a backward may send gradients before its end.
        advice: What users may do about it, as ``check_called_alike`` takes it.

    Attributes:
        deferring: Whether backwards send nothing just now.
    """

    def __init__(
        self, module: torch.nn.Module, collectives: Collectives, *, gathers: bool, sends: bool, advice: str = ""
    ) -> None:
        self.deferring = False
        self._module, self._collectives, self._advice = module, collectives, advice
        self._kind = type(module).__name__  # which engines may exchange
        self._gathers, self._sends = gathers, sends
        self._compares_calls = gathers
        self._hooks: list[RemovableHandle] = []

    def watch_gradients(self) -> None:
        """Compare gradients as they are made, before hooks that are registered later."""
        if not self._sends:
            return
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad:
                reached = self._reached(f"the gradient of {name!r} of {self._kind}")
                self._hooks.append(parameter.register_post_accumulate_grad_hook(reached))

    def watch_calls(self) -> None:
        """Compare calls of submodules, and the backwards of all modules, before parameters are gathered for them."""
        if not self._gathers:
            return
        for name, part in self._module.named_modules():
            what = f"{name!r} of {self._kind}" if name else self._kind
            if name:
                self._hooks.append(part.register_forward_pre_hook(self._called(what), prepend=True))
            self._hooks.append(part.register_forward_hook(self._returned(f"the backward of {what}")))

    def begin_call(self) -> None:
        """Check that all ranks call the module.

        Raises:
            SetupError: On every rank, if they do not.
        """
        # Of compiled modules some ranks may run parts in Python.
        self._compares_calls = self._gathers and not is_compiled(self._module)
        self._compare_call(self._kind)

    def end_call(self) -> None:
        """Check that the module's forward ends on all ranks.

        Raises:
            SetupError: On every rank, if it does not.
        """
        self._compare_call(f"the end of a forward of {self._kind}")

    def begin_backward(self) -> None:
        """Check that all ranks begin a backward.

        Raises:
            SetupError: On every rank, if they do not.
        """
        self._compare_call("a backward")

    def end_backward(self) -> None:
        """Check that the backward ends on all ranks.

        Raises:
            SetupError: On every rank, if it does not.
        """
        if self._compares_calls or (self._sends and not self.deferring):
            check_called_alike("the end of a backward", self._collectives, self._advice)

    def close(self) -> None:
        """Remove all hooks from the module."""
        for hook in self._hooks:
            hook.remove()

    def _compare_call(self, what: str) -> None:
        if self._compares_calls:
            check_called_alike(what, self._collectives, self._advice)

    def _called(self, what: str) -> Callable[[torch.nn.Module, Any], None]:
        def compare(module: torch.nn.Module, args: Any) -> None:
            del module, args
            if not torch.compiler.is_compiling():
                self._compare_call(what)

        return compare

    def _returned(self, what: str) -> Callable[[torch.nn.Module, Any, Any], None]:
        def watch(module: torch.nn.Module, args: Any, output: Any) -> None:
            del module, args
            if torch.compiler.is_compiling() or not self._compares_calls:
                return
            named = types.SimpleNamespace(output=output)  # what an output holds itself would be left out
            # Holds no module, or the graph would hold it too.
            compare = functools.partial(check_called_alike, what, self._collectives, self._advice)
            for tensor in inside_objects(named):
                if tensor.grad_fn is not None:  # else it is a parameter, which keeps its hooks
                    tensor.register_hook(lambda _: compare())

        return watch

    def _reached(self, what: str) -> Callable[[torch.Tensor], None]:
        def compare(parameter: torch.Tensor) -> None:
            del parameter
            if not self.deferring:
                check_called_alike(what, self._collectives, self._advice)

        return compare
