"""Gathering what each data rank has of its samples: tensors, and lists of objects, of different lengths too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from shard_core.collectives.messages import pack, unpack
from shard_core.errors import CollectiveError
from shard_core.structures import map_leaves

if TYPE_CHECKING:
    from shard_core.collectives.interface import Collectives
    from shard_core.mesh import DataRanks

T = TypeVar("T")

#: What a rank has: the dtype and shape of each tensor, each list of objects, None; or why it cannot be gathered.
_Found = dict[str, Any] | str

_EXAMPLES = "give tensors whose first dimension is the samples, or lists with one object per sample"


class Drawn(Protocol):
    """A batch that each data rank was handed."""

    @property
    def size(self) -> int | None:
        """How many samples this rank's has; None if that is not known."""

    def places(self, sizes: Sequence[int]) -> Sequence[tuple[int, int]]:
        """List data ranks and places among the samples of each, in the order of the data."""


def exchange(value: T, collectives: Collectives, device: torch.device) -> list[T]:
    """Return every rank's value, in rank order; what is refused among several ranks is refused alone, too.

    Args:
        value: This rank's, of the values that ``Coordinator`` lists.
        collectives: Of all ranks.
        device: Where tensors go that were on a device.

    Raises:
        CollectiveError: If a value is none of these; on every rank.
    """
    if collectives.world_size == 1:
        return [unpack(memoryview(pack(value)), device)]
    return collectives.gather_objects(value)


class SampleGather:
    """Gathers samples from all data ranks into one order, for ``gather_for_metrics``.

    Every rank first learns in one message what all have, so that all raise alike; lists travel in it. Each tensor is
    then gathered among the data ranks, filled up to the longest.

    Args:
        collectives: Of all ranks.
        ranks: Those that see different data.
        device: Where objects' tensors go that were on a device.
    """

    def __init__(self, collectives: Collectives, ranks: DataRanks, device: torch.device) -> None:
        self._collectives = collectives
        self._ranks = ranks
        self._device = device

    def gather(self, data: Any, drawn: Drawn | str, *, objects: bool = False) -> Any:
        """Return everybody's samples in the structure of what was given; every rank calls this.

        Args:
            data: Tensors whose first dimension is the samples, lists without tensors of one object per sample, or
                structures of these.
            drawn: The batch they belong to, or why it is not known.
            objects: Whether it is one list, whatever its objects consist of.

        Returns:
            The same on every rank.

        Raises:
            CollectiveError: If something is neither, has another number of samples than the batch, or is not alike
                on all ranks.
        """
        mine = drawn if isinstance(drawn, str) else _found(data, objects, drawn.size)
        found_by: dict[int, dict[str, Any]] = {}
        for rank, found in exchange((self._ranks.rank, mine), self._collectives, self._device):
            if isinstance(found, str):
                raise CollectiveError(found)
            found_by.setdefault(rank, found)  # ranks that see the same data have the same
        assert not isinstance(drawn, str)
        everyone = [found_by[rank] for rank in range(self._ranks.size)]
        _check_alike(everyone)
        gathered: dict[str, Any] = {}
        tensors = _leaves(data, objects)
        for path in sorted(everyone[0]):
            kind, *_ = everyone[0][path]
            if kind == "tensor":
                gathered[path] = self._tensor(tensors[path], [each[path][2] for each in everyone], drawn)
            elif kind == "list":
                lists = [each[path][1] for each in everyone]
                gathered[path] = [lists[rank][place] for rank, place in drawn.places([*map(len, lists)])]
        return map_leaves(data, lambda path, _: gathered.get(path), is_leaf=_is_leaf(objects))

    def _tensor(self, tensor: torch.Tensor, shapes: Sequence[tuple[int, ...]], drawn: Drawn) -> torch.Tensor:
        """Gather a tensor of which ranks may have different lengths."""
        sizes = [shape[0] if shape else 1 for shape in shapes]
        rows = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
        missing = max(sizes) - len(rows)
        if missing:
            rows = torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])
        stack = self._collectives.all_gather(rows, self._ranks.group)
        index = [rank * max(sizes) + place for rank, place in drawn.places(sizes)]
        return stack.flatten(0, 1)[torch.tensor(index, dtype=torch.int64, device=stack.device)]


def _found(data: Any, objects: bool, wanted: int | None) -> _Found:
    """Describe what this rank has; nothing raises here, while others wait for the answer."""
    found: dict[str, Any] = {}
    for path, leaf in _leaves(data, objects).items():
        at = f" at {path}" if path else ""
        if isinstance(leaf, torch.Tensor):
            size = len(leaf) if leaf.dim() else None
            found[path] = "tensor", leaf.dtype, tuple(leaf.shape)
        elif isinstance(leaf, list):
            size = len(leaf)
            found[path] = "list", leaf
        elif leaf is None and path:
            found[path] = ("nothing",)
            continue
        else:
            return f"gather_for_metrics was given an object of type {type(leaf).__name__}{at}; {_EXAMPLES}."
        if wanted is not None and size != wanted:
            what = "a list" if isinstance(leaf, list) else f"a tensor of shape {tuple(leaf.shape)}"
            return (
                f"gather_for_metrics was given {what}{'' if size is None else f' of {size} samples'}{at}, and the "
                f"batch drawn last has {wanted}; {_EXAMPLES}, batch by batch inside the loop over the loader, "
                "and call all_gather or reduce for all else."
            )
    return found


def _is_leaf(objects: bool) -> Callable[[Any], bool]:
    return lambda data: isinstance(data, list) and (objects or not _has_tensor(data))


def _has_tensor(data: Any) -> bool:
    found: list[bool] = []
    map_leaves(data, lambda _, leaf: found.append(isinstance(leaf, torch.Tensor)))
    return any(found)


def _leaves(data: Any, objects: bool) -> dict[str, Any]:
    leaves: dict[str, Any] = {}

    def note(path: str, leaf: Any) -> None:
        leaves[path] = object() if path in leaves else leaf  # two keys that are written alike

    map_leaves(data, note, is_leaf=_is_leaf(objects))
    return leaves


def _check_alike(everyone: Sequence[dict[str, Any]]) -> None:
    first = _alike(everyone[0])
    for rank, found in enumerate(everyone[1:], start=1):
        other = _alike(found)
        path = next((path for path in sorted({*first, *other}) if first.get(path) != other.get(path)), None)
        if path is not None:
            raise CollectiveError(
                f"ranks gave different structures to gather_for_metrics: data rank {rank} has "
                f"{other.get(path, 'nothing')}{f' at {path}' if path else ''}, where data rank 0 has "
                f"{first.get(path, 'nothing')}; only the first dimension may differ, pad all others to one length."
            )


def _alike(found: dict[str, Any]) -> dict[str, str]:
    """Describe what must be alike on all ranks: everything but numbers of samples."""
    return {path: _described(*what) for path, what in found.items()}


def _described(kind: str, *about: Any) -> str:
    if kind != "tensor":
        return {"list": "a list", "nothing": "None"}[kind]
    dtype, shape = about
    sizes = ", ".join(["samples", *map(str, shape[1:])] if shape else [])
    return f"{str(dtype).removeprefix('torch.')} ({sizes})"
