"""Recording one call: what it reads, what it writes and what it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shard_core._versions import FakeTensor, written_arguments
from shard_core.initialization.tape import Operation, Tape, Value, View, leaves, transformed

if TYPE_CHECKING:
    from shard_core.initialization.stream import Stream

#: Operators that fill their first argument without reading it.
_OVERWRITING = {
    "bernoulli_",
    "cauchy_",
    "copy_",
    "exponential_",
    "fill_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
    "zero_",
}
#: Operators that leave what they return undefined.
_BLANK = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
#: Operators that read the shape, not the values, of their first argument.
_SHAPED = _BLANK | {
    "full_like",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones_like",
    "rand_like",
    "randint_like",
    "randn_like",
    "zeros_like",
}
#: The operators that change a tensor's shape and touch its storage too.
_RESIZING = {"resize_", "resize_as_"}


class Call:
    """A call under way: its arguments are noted before it can change their shapes, its outcome after.

    A function that is no operator of torch is an initialiser that overwrites its first argument.
    """

    def __init__(self, tape: Tape, function: Any, args: Any, kwargs: Any, stream: Stream | None = None) -> None:
        self._tape = tape
        self._function = function
        self._stream = stream
        self._before = stream.here() if stream is not None else None
        self._operator = hasattr(function, "overloadpacket")
        self._name = (function.overloadpacket if self._operator else function).__name__
        written = written_tensors(function, args, kwargs) if self._operator else [args[0]]
        self._written: list[torch.Tensor] = [tensor for tensor in written if isinstance(tensor, FakeTensor)]
        reshapes = self._operator and torch.Tag.inplace_view in function.tags
        self._only_reshapes = reshapes and self._name not in _RESIZING
        self._whole = self._overwritten(args, kwargs)
        self._overwrites: list[Value] = []
        self._reads: dict[Value, None] = {}
        self._args = transformed(args, self._note)
        self._kwargs = transformed(kwargs, self._note)

    @property
    def writes(self) -> bool:
        """Whether the call writes to a recorded tensor."""
        return bool(self._written)

    def returned(self, output: Any) -> None:
        """Append the call to the tape, unless it only read shapes."""
        if self._only_reshapes:
            return
        tensors = [leaf for leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
        if self._name in _BLANK:
            for tensor in tensors:
                self._tape.hold(tensor, Value(tensor.untyped_storage().nbytes(), tensor.device))
            return
        changed = self._written if self._whole is None else []
        new = [tensor for tensor in tensors if not self._tape.holds(tensor, self._function)]
        if not (changed or new or self._overwrites or self._stream is not None):
            return
        operation = Operation(
            index=len(self._tape.operations),
            function=self._function,
            args=self._args,
            kwargs=self._kwargs,
            outputs=[],
            default_dtype=torch.get_default_dtype(),
            reads=list(self._reads),
            overwrites=self._overwrites,
            renews=[],
            creates=[],
            stream=self._stream,
            before=self._before,
        )
        self._settle(operation, changed, new)
        operation.outputs += [self._tape.view(tensor, self._function) for tensor in tensors]
        self._tape.append(operation)

    def _settle(self, operation: Operation, changed: list[torch.Tensor], new: list[torch.Tensor]) -> None:
        tape = self._tape
        if self._whole is not None:
            operation.overwrites[0].producer = operation
            tape.hold(self._whole, operation.overwrites[0])
        for tensor in changed:
            old = tape.value(tensor, self._function)
            if old.producer is not operation:
                value = Value(tensor.untyped_storage().nbytes(), tensor.device, operation)
                operation.renews.append((old, value))
                tape.hold(tensor, value)
        for tensor in new:
            if not tape.holds(tensor, self._function):
                value = Value(tensor.untyped_storage().nbytes(), tensor.device, operation)
                operation.creates.append(value)
                tape.hold(tensor, value)

    def _note(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self._name in _SHAPED:
            return View.of(leaf, None)
        if not isinstance(leaf, FakeTensor):
            # A tensor with values is a constant; it is copied since its owner may change it before the replay.
            return leaf.detach().clone()
        if leaf is self._whole:
            fresh = Value(leaf.untyped_storage().nbytes(), leaf.device)
            self._overwrites.append(fresh)
            return View.of(leaf, fresh)
        value = self._tape.value(leaf, self._function)
        self._reads[value] = None
        return View.of(leaf, value)

    def _overwritten(self, args: Any, kwargs: Any) -> torch.Tensor | None:
        if (self._operator and self._name not in _OVERWRITING) or not isinstance(args[0], FakeTensor):
            return None
        target: torch.Tensor = args[0]
        storage = target.untyped_storage()
        whole = target.is_contiguous() and target.numel() * target.element_size() == storage.nbytes()
        others = [leaf for leaf in leaves((args[1:], kwargs)) if isinstance(leaf, FakeTensor)]
        return target if whole and all(t.untyped_storage() is not storage for t in others) else None


def begins_recording(operator: Any) -> bool:
    """Return whether an operator makes a tensor without values though its arguments have them.

    These draw, or turn what Python knows into a tensor, or take no more than a shape; anything else that is done to
    tensors with values alone is simply done.
    """
    name: str = operator.overloadpacket.__name__
    return torch.Tag.nondeterministic_seeded in operator.tags or name in _SHAPED or name.startswith("lift")


def written_tensors(operator: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """List the tensors among its arguments that an operator writes to."""
    written = written_arguments(operator)
    trees = [tree for key, tree in [*enumerate(args), *kwargs.items()] if key in written]
    return [leaf for leaf in leaves(trees) if isinstance(leaf, torch.Tensor)]
