"""Whether ranks read the same data: by what they were given, by marks that libraries leave, by the first batch."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shard_core._versions import is_split_over_ranks
from shard_core.errors import InvalidOption

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from shard_core.coordinator import Coordinator

T = TypeVar("T")

_CHOICE = (
    "pass shard_stream=True to process_dataloader if every rank's loader gives all batches in the same order, or "
    "shard_stream=False if each rank's loader gives that rank's own share."
)


def check_same_data(mine: Mapping[str, Any], extra: T, coordinator: Coordinator) -> T:
    """Check that all ranks were given the same data.

    Args:
        mine: What must be alike, by name.
        extra: What need not be.
        coordinator: Of all ranks.

    Returns:
        Rank 0's extra value.

    Raises:
        InvalidOption: If they were not; names the first difference.
    """
    facts = coordinator.gather_objects((dict(mine), extra))
    first, extra = facts[0]
    for rank, (theirs, _) in enumerate(facts):
        for name, value in theirs.items():
            if value != first.get(name):
                raise InvalidOption(
                    f"ranks were given different data: {name} is {value!r} on rank {rank} and {first.get(name)!r} on "
                    "rank 0; build the same loader over all the data on every rank."
                )
    return extra


def shards_itself(loader: DataLoader[Any]) -> bool:
    """Return whether a loader bears a mark that each rank has its own share: its library's split, or a position.

    A loader that keeps its own position comes from a library that streams, and these shard by themselves.

    Args:
        loader: The user's loader over an iterable dataset.
    """
    return hasattr(loader, "state_dict") or is_split_over_ranks(loader.dataset)


def reads_alike(first: list[Any], *, marked: bool, replicas: int, coordinator: Coordinator) -> bool | None:
    """Compare the first batch of all ranks; every rank calls this.

    Args:
        first: This rank's first batch; empty if its stream is.
        marked: Whether there is a mark that each rank has its own share.
        replicas: How many ranks are to see different data.
        coordinator: Of all ranks.

    Returns:
        Whether every rank reads all the data, or None if all streams are empty, which proves nothing.

    Raises:
        InvalidOption: If the batches contradict the mark, differ without one, or cannot be compared.
    """
    found = coordinator.gather_objects(digest(first[0]) if first else "")
    if None in found:
        raise InvalidOption(f"the first batches of the ranks' streams cannot be compared; {_CHOICE}")
    if not any(found):
        return None
    alike = len(set(found)) == 1
    if not alike and not marked:
        raise InvalidOption(
            f"the ranks' streams begin with different batches, or with different random numbers; {_CHOICE}"
        )
    if alike and marked and replicas > 1:
        raise InvalidOption(
            f"this stream is split over ranks or keeps its own position, and yet all ranks begin with the same batch; "
            f"{_CHOICE}"
        )
    return not marked


def digest(batch: Any) -> str | None:
    """Compute a digest that is alike on all ranks if a batch is.

    Args:
        batch: Tensors and anything that can be pickled, nested.

    Returns:
        Hexadecimal digits; None if part of the batch can be put into bytes in no way.

    Example:
        >>> digest({"ids": torch.zeros(2)}) == digest({"ids": torch.zeros(2)}) != digest({"ids": torch.zeros(3)})
        True
        >>> digest([lambda: 1]) is None
        True
    """
    try:
        return _digested(batch)
    except Exception:  # noqa: BLE001 - what a stranger's object raises on being pickled is its own affair
        return None


def _digested(value: Any) -> str:
    sink = _Sink()
    pickler = _Digester(sink, protocol=5)
    pickler.fast = True  # otherwise it would count which of two equal strings are one object
    pickler.dump(value)
    return sink.hash.hexdigest()


class _Sink:
    """Digests what is written to it."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> None:
        self.hash.update(data)


class _Digester(pickle.Pickler):
    """Writes values alone: nobody reads the pickle, and nothing in it depends on the process."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            values = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return "tensor", str(obj.dtype), tuple(obj.shape), values.numpy().tobytes()
        if isinstance(obj, set | frozenset):  # in an order that differs between processes
            return "set", sorted(map(_digested, obj))
        return None
