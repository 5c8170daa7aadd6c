"""What was done to tensors without values: operations, and the contents of each storage between two writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shard_core._versions import identity
from shard_core.errors import CannotReplay
from shard_core.initialization.stream import Position, Stream


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """The contents of one storage between two writes."""

    nbytes: int
    device: torch.device
    producer: Operation | None = None
    readers: list[Operation] = dataclasses.field(default_factory=list)

    def bytes(self) -> View:
        """Describe the whole storage as bytes."""
        return View(
            value=self,
            dtype=torch.uint8,
            size=(self.nbytes,),
            stride=(1,),
            offset=0,
            conjugate=False,
            negative=False,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How one tensor views a storage; ``value`` is ``None`` where only its shape matters."""

    value: Value | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, value: Value | None) -> View:
        """Describe a tensor over the given contents."""
        return cls(
            value=value,
            dtype=tensor.dtype,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            conjugate=tensor.is_conj(),
            negative=tensor.is_neg(),
        )

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor that views a real storage in this way."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.conjugate:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.negative else tensor

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether a real tensor views its storage in this way."""
        return self == View.of(tensor, self.value)


@dataclasses.dataclass(eq=False, slots=True)
class Operation:
    """One call that made or changed values.

    Attributes:
        index: Its place in the program.
        function: What was called.
        args: Positional arguments, a ``View`` in place of each recorded tensor.
        kwargs: Keyword arguments, likewise.
        outputs: A ``View`` for each tensor that came out.
        default_dtype: What ``torch.get_default_dtype`` returned.
        reads: The contents it needs.
        overwrites: The contents it gives to a storage as a whole, without reading the old ones.
        renews: Pairs of contents it changes in place, before and after.
        creates: The contents of the storages it makes.
        stream: The generator it draws from, if any.
        before: Where that generator stood.
        after: Where it stands then.
    """

    index: int
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    outputs: list[View]
    default_dtype: torch.dtype
    reads: list[Value]
    overwrites: list[Value]
    renews: list[tuple[Value, Value]]
    creates: list[Value]
    stream: Stream | None = None
    before: Position | None = None
    after: Position | None = None


class Tape:
    """The operations on one set of recorded tensors, in order, and what their storages hold now.

    Attributes:
        operations: The program.
        streams: The generators it draws from, by their identity.
        landmarks: Positions whose states a replay keeps when it passes them.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.streams: dict[int, Stream] = {}
        self.landmarks: set[Position] = set()
        self._current: dict[int, Value] = {}
        self._storages: list[torch.UntypedStorage] = []

    def append(self, operation: Operation) -> None:
        """Append an operation, and move the generator it draws from."""
        self.operations.append(operation)
        for value in operation.reads:
            value.readers.append(operation)
        if operation.stream is not None:
            operation.after = operation.stream.advance(operation)

    def stream(self, generator: torch.Generator) -> Stream:
        """Return the positions of a generator."""
        return self.streams.setdefault(identity(generator), Stream(generator))

    def view(self, tensor: torch.Tensor, reader: object) -> View:
        """Describe a recorded tensor over what it holds now; see ``value``."""
        return View.of(tensor, self.value(tensor, reader))

    def hold(self, tensor: torch.Tensor, value: Value) -> None:
        """Record what the storage of a tensor holds from now on."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._current:
            self._storages.append(storage)
        self._current[id(storage)] = value

    def holds(self, tensor: torch.Tensor, reader: object) -> bool:
        """Return whether the storage of a tensor is known."""
        if tensor.layout is not torch.strided:
            raise CannotReplay(
                f"{reader} makes a tensor of layout {tensor.layout}, and only dense tensors can be built without their"
                " values; build the module outside the strategy's module_init_context"
            )
        return id(tensor.untyped_storage()) in self._current

    def value(self, tensor: torch.Tensor, reader: object) -> Value:
        """Return what the storage of a recorded tensor holds now.

        Raises:
            CannotReplay: When its storage was filled and no operation was recorded.
        """
        if not self.holds(tensor, reader):
            if tensor.untyped_storage().nbytes():
                raise CannotReplay(
                    f"{reader} reads a tensor of shape {tuple(tensor.shape)} that no recorded operation filled (was it"
                    " loaded from a file?); build with empty weights and load them after setup with"
                    " strategy.load_weights(), or build outside the strategy's module_init_context"
                )
            self.hold(tensor, Value(0, tensor.device))
        return self._current[id(tensor.untyped_storage())]


def leaves(tree: Any) -> Iterator[Any]:
    """Yield what is in nested tuples, lists and dicts, in order."""
    if isinstance(tree, tuple | list):
        for branch in tree:
            yield from leaves(branch)
    elif isinstance(tree, dict):
        yield from leaves(list(tree.values()))
    else:
        yield tree


def transformed(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested tuples, lists and dicts with each leaf changed."""
    if isinstance(tree, tuple):
        return tuple(transformed(branch, change) for branch in tree)
    if isinstance(tree, list):
        return [transformed(branch, change) for branch in tree]
    if isinstance(tree, dict):
        return {key: transformed(branch, change) for key, branch in tree.items()}
    return change(tree)
