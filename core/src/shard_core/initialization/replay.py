"""Running recorded operations on real memory, a value at a time."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shard_core._versions import unset_fake_temporarily
from shard_core.errors import CannotReplay
from shard_core.initialization.schedule import closure, ordered, revisited
from shard_core.initialization.tape import Operation, Value, View, leaves, transformed

if TYPE_CHECKING:
    from shard_core.initialization.stream import Position, Stream


class Replay:
    """One run of the operations that some values depend on.

    Operations that draw run in program order; one that does not draw runs as soon as what it needs is there, so that a
    value is complete, delivered and dropped long before the end of the program. A value that is overwritten before
    anybody read it is dropped at once.

    Args:
        wanted: Which values to deliver, each with what its receivers call it and how they view it.
        deliver: Called with a name and a tensor, as soon as nothing else needs the value.
        ends: Positions of generators that must be known in the end.
        landmarks: Positions whose states are kept when passed, so that a later run can start there; None keeps all.
    """

    def __init__(
        self,
        wanted: Mapping[Value, Sequence[tuple[str, View]]],
        deliver: Callable[[str, torch.Tensor], None],
        *,
        ends: Iterable[Position] = (),
        landmarks: Iterable[Position] | None = (),
    ) -> None:
        self._wanted = dict(wanted)
        self._deliver = deliver
        ends = set(ends)
        self.operations = closure(wanted, ends)
        self._keep = None if landmarks is None else {*revisited(self.operations), *ends, *landmarks}
        self._left = Counter(value for operation in self.operations for value in operation.reads)
        self._memory: dict[Value, torch.UntypedStorage] = {}
        self._at: dict[Stream, tuple[Position, torch.Tensor]] = {}
        self._live = 0
        self.peak_bytes = 0

    @property
    def draws(self) -> bool:
        """Whether any random number is drawn."""
        return any(operation.stream is not None for operation in self.operations)

    def run(self) -> None:
        """Run everything; the generators are left in the states they were found in."""
        streams = {operation.stream for operation in self.operations if operation.stream is not None}
        found = {stream: stream.generator.get_state() for stream in streams}
        with unset_fake_temporarily(), torch.no_grad():
            try:
                for operation in ordered(self.operations):
                    self._run(operation)
                for value in list(self._wanted):
                    self._release(value)
            finally:
                for stream, state in found.items():
                    stream.generator.set_state(state)

    def _run(self, operation: Operation) -> None:
        def real(leaf: Any) -> Any:
            return self._real(leaf, operation) if isinstance(leaf, View) else leaf

        args, kwargs = transformed(operation.args, real), transformed(operation.kwargs, real)
        with self._draw(operation), _default_dtype(operation.default_dtype):
            output = operation.function(*args, **kwargs)
        self._pass_on(operation)
        inputs = {
            leaf.untyped_storage().data_ptr() for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        tensors = [leaf for leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
        for view, tensor in zip(operation.outputs, tensors, strict=True):
            if view.value in operation.creates:
                self._adopt(view, tensor, inputs, operation)
        del args, kwargs, output, tensors
        for value in operation.reads:
            self._left[value] -= 1
        renewed = [new for _, new in operation.renews]
        for value in {*operation.reads, *operation.overwrites, *operation.creates, *renewed}:
            if not self._left[value]:
                self._release(value)

    def _real(self, view: View, operation: Operation) -> torch.Tensor:
        value = view.value
        if value is None:
            tensor: torch.Tensor = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device="cpu")
            return tensor
        if value not in self._memory:
            # What is overwritten whole needs no contents; what nobody ever filled is zero, the same on every rank.
            make = torch.empty if value in operation.overwrites else torch.zeros
            self._store(value, make(value.nbytes, dtype=torch.uint8, device=value.device).untyped_storage())
        return view.over(self._memory[value])

    def _pass_on(self, operation: Operation) -> None:
        for old, new in operation.renews:
            self._memory[new] = self._memory.pop(old)

    def _adopt(self, view: View, tensor: torch.Tensor, inputs: set[int], operation: Operation) -> None:
        value = view.value
        assert value is not None
        if (tuple(tensor.shape), tensor.dtype, tensor.layout) != (view.size, view.dtype, torch.strided):
            raise CannotReplay(
                f"{operation.function} gave a {tensor.layout} tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"
                f" where the recording promised a dense one of {view.size} and {view.dtype}; build the module outside"
                " the strategy's module_init_context"
            )
        storage = tensor.untyped_storage()
        if value not in self._memory and view.fits(tensor) and storage.data_ptr() not in inputs:
            self._store(value, storage)
            return
        if value not in self._memory:
            blank = torch.zeros(value.nbytes, dtype=torch.uint8, device=value.device)
            self._store(value, blank.untyped_storage())
        if self._memory[value].data_ptr() != storage.data_ptr() or not view.fits(tensor):
            view.over(self._memory[value]).copy_(tensor)

    def _store(self, value: Value, storage: torch.UntypedStorage) -> None:
        self._memory[value] = storage
        self._live += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._live)

    def _release(self, value: Value) -> None:
        receivers = self._wanted.pop(value, ())
        if receivers and value not in self._memory:
            zeros = torch.zeros(value.nbytes, dtype=torch.uint8, device=value.device)
            self._store(value, zeros.untyped_storage())
        storage = self._memory.pop(value, None)
        if storage is None:
            return
        self._live -= storage.nbytes()
        for name, view in receivers:
            self._deliver(name, view.over(storage))

    @contextlib.contextmanager
    def _draw(self, operation: Operation) -> Iterator[None]:
        stream, before, after = operation.stream, operation.before, operation.after
        if stream is None or before is None or after is None:
            yield
            return
        position, state = self._at.get(stream, (None, None))
        state = state if position is before else before.state
        assert state is not None
        # Set anew each time: whoever receives tensors may draw numbers of its own.
        stream.generator.set_state(state)
        yield
        state = stream.generator.get_state()
        self._at[stream] = (after, state)
        if self._keep is None or after in self._keep:
            after.state = state


def evaluate(values: Iterable[Value]) -> tuple[dict[Value, torch.UntypedStorage], bool]:
    """Compute contents at this point of the program.

    Args:
        values: What to compute.

    Returns:
        The storage of each value, and whether random numbers had to be drawn for it.
    """
    storages: dict[Value, torch.UntypedStorage] = {}
    named = {str(k): value for k, value in enumerate(values)}

    def keep(name: str, tensor: torch.Tensor) -> None:
        storages[named[name]] = tensor.untyped_storage()

    replay = Replay({value: [(name, value.bytes())] for name, value in named.items()}, keep, landmarks=None)
    replay.run()
    return storages, replay.draws


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    usual = torch.get_default_dtype()
    if dtype is usual:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)
