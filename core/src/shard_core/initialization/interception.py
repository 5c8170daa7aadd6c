"""Intercepting every operation on tensors without values, inside the constructors' block and after it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from shard_core._versions import (
    NEEDS_VALUES,
    FakeTensor,
    FakeTensorMode,
    forget_tensors,
    unset_fake_temporarily,
)
from shard_core.errors import CannotReplay
from shard_core.initialization.call import Call, begins_recording, written_tensors
from shard_core.initialization.replay import evaluate
from shard_core.initialization.tape import Tape, leaves, transformed

if TYPE_CHECKING:
    from shard_core.initialization.stream import Stream


class Interception(FakeTensorMode):
    """Makes tensors without values and records what is done to them, wherever it is done."""

    def __init__(self, owner: object) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.owner = owner
        self.tape = Tape()
        self._inside = False
        self._warned = False

    def __deepcopy__(self, memo: Any) -> Interception:
        """Return itself: a copied tensor refers to the same recording."""
        return self

    def may_turn_const(self, t: torch.Tensor) -> bool:  # noqa: ARG002
        """Return False: no values are kept but on the tape."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = {**(kwargs or {})}
        if self._inside or func.namespace == "prim":
            return super().__torch_dispatch__(func, types, args, kwargs)
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        others = [tensor for tensor in tensors if intercepted(tensor) and not self.is_our_fake(tensor)]
        if others:
            written = [tensor for tensor in written_tensors(func, args, kwargs) if intercepted(tensor)]
            if not any(self.is_our_fake(tensor) for tensor in written or tensors):
                with (written or others)[0].fake_mode:
                    return func(*args, **kwargs)
            args, kwargs = transformed(args, self._resolved), transformed(kwargs, self._resolved)
        elif tensors and not any(self.is_our_fake(tensor) for tensor in tensors) and not begins_recording(func):
            return func(*args, **kwargs)
        return self._record(func, types, args, kwargs)

    def initialise(self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Record an initialiser that draws random numbers and reads them as one operation."""
        with unset_fake_temporarily():
            call = Call(self.tape, function, (tensor, *args), kwargs, self._stream((args, kwargs)))
            call.returned(tensor)
        return tensor

    def value_of(self, tensor: torch.Tensor, reader: object) -> torch.Tensor:
        """Compute what a tensor holds at this point of the program."""
        view = self.tape.view(tensor, reader)
        assert view.value is not None
        storage = self._evaluated([tensor], reader)[view.value]
        with unset_fake_temporarily():
            return view.over(storage)

    def _record(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if any(not isinstance(tensor, FakeTensor) for tensor in written_tensors(func, args, kwargs)):
            if draws:
                raise CannotReplay(
                    f"{func} draws random numbers into a tensor that has values already; make the tensor in the"
                    " constructor, with torch.empty, or build outside the strategy's module_init_context"
                )
            return self._on_values(func, args, kwargs)
        if draws:
            _check_devices(func, (args, kwargs))
        call = Call(self.tape, func, args, kwargs, self._stream((args, kwargs)) if draws else None)
        self._inside = True
        # What is drawn has the same shape whatever it is drawn from, so torch may find it out on zeros.
        self.allow_fallback_kernels = draws
        try:
            output = super().__torch_dispatch__(func, types, args, kwargs)
        except NEEDS_VALUES:
            if draws or call.writes:
                raise CannotReplay(
                    f"{func}, called by {_constructor()}, has no meaning without values; build the module outside"
                    " the strategy's module_init_context"
                ) from None
            output = transformed(self._on_values(func, args, kwargs), self._without_value)
        finally:
            self._inside = False
            forget_tensors(self)
        if output is not NotImplemented:
            call.returned(output)
        return output

    def _on_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        recorded = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        storages = self._evaluated(recorded, func)

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, FakeTensor):
                return leaf
            view = self.tape.view(leaf, func)
            assert view.value is not None
            return view.over(storages[view.value])

        with torch.no_grad():
            return func(*transformed(args, real), **transformed(kwargs, real))

    def _evaluated(self, tensors: Iterable[torch.Tensor], reader: object) -> dict[Any, torch.UntypedStorage]:
        storages, drawn = evaluate({self.tape.value(tensor, reader) for tensor in tensors})
        if drawn and not self._warned:
            self._warned = True
            warnings.warn(
                f"{_constructor()} looks at random values while it is built without them ({reader}): the numbers"
                " drawn so far are drawn now and again at setup, so building takes about twice as long",
                stacklevel=2,
            )
        return storages

    def _without_value(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with self:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)

    def _resolved(self, leaf: Any) -> Any:
        """Return the values of a tensor of another recording; anything else as it is."""
        if not intercepted(leaf) or self.is_our_fake(leaf):
            return leaf
        assert isinstance(leaf.fake_mode, Interception)
        return leaf.fake_mode.value_of(leaf, "a second module_init_context")

    def _stream(self, arguments: Any) -> Stream:
        given = [leaf for leaf in leaves(arguments) if isinstance(leaf, torch.Generator)]
        return self.tape.stream(given[0] if given else torch.default_generator)


class Values(TorchFunctionMode):
    """Answers ``numpy`` and ``tolist`` of tensors without values, which no dispatch sees.

    Memory that has values, such as that of a file, becomes a tensor that has them, and a tensor that has values keeps
    some when it is given the data of one that has none. It also keeps torch quiet where copying such a tensor asks for
    its address.
    """

    _READERS = (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist)
    _SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # torch's stubs take it for a tensor

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
                return func(*args, **(kwargs or {}))
        if func is torch.asarray and isinstance(args[0], torch.UntypedStorage):
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        if func == self._SET_DATA and intercepted(args[1]) and not intercepted(args[0]):
            assert isinstance(args[1].fake_mode, Interception)
            value = args[1].fake_mode.value_of(args[1], "torch.Tensor.data")
            with unset_fake_temporarily():
                return func(args[0], value)
        if func not in self._READERS or not intercepted(args[0]):
            return func(*args, **(kwargs or {}))
        assert isinstance(args[0].fake_mode, Interception)
        value = args[0].fake_mode.value_of(args[0], f"torch.Tensor.{func.__name__}")
        with unset_fake_temporarily():
            answer = func(value.requires_grad_(args[0].requires_grad), *args[1:], **(kwargs or {}))
        if isinstance(answer, np.ndarray):
            # Writing to it would change the tensor in a plain build, and here it would be lost.
            answer.setflags(write=False)
        return answer


def intercepted(thing: object) -> TypeGuard[FakeTensor]:
    """Return whether something is a tensor without values of a recording."""
    return isinstance(thing, FakeTensor) and isinstance(thing.fake_mode, Interception)


def _check_devices(func: Any, arguments: Any) -> None:
    named = {leaf.type for leaf in leaves(arguments) if isinstance(leaf, torch.device)}
    devices = named | {leaf.device.type for leaf in leaves(arguments) if isinstance(leaf, torch.Tensor)}
    if devices - {"cpu", "meta"}:
        raise CannotReplay(
            f"{func}, called by {_constructor()}, draws random numbers on {', '.join(sorted(devices))}; inside"
            " module_init_context modules are built on the CPU, and the strategy moves them"
        )


def _constructor() -> str:
    """Return the name of the ``__init__`` that is running."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), torch.nn.Module):
            return f"{type(frame.f_locals['self']).__name__}.__init__"
        frame = frame.f_back
    return "the program"
