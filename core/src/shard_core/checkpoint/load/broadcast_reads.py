"""Broadcast reads: bytes that several ranks want, read from a store by one of them and broadcast to the others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shard_core.checkpoint.all_ranks import on_all_ranks
from shard_core.checkpoint.format.ragged import starts
from shard_core.checkpoint.storage.batches import batched
from shard_core.checkpoint.storage.reads import FileRange

if TYPE_CHECKING:
    from shard_core.checkpoint.storage.reads import FileReads
    from shard_core.coordinator import Coordinator

#: How much is on its way between ranks at once: so much memory is needed.
_BYTES_AT_ONCE = 1 << 26


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shared:
    """A range, and the rank that reads it for the others."""

    reader: int
    range: FileRange

    def __len__(self) -> int:
        """How many bytes it has."""
        return self.range.stop - self.range.start


def broadcast_reads(reads: FileReads, wanted: Sequence[FileRange], coordinator: Coordinator, doing: str) -> None:
    """Read what many ranks want, each range on one rank, and broadcast it; every rank calls this.

    A broadcast reaches all ranks, so this is done with what at least half of them want: all of what replicas of a
    whole model read, none of what is sharded over many ranks. The rest each rank reads itself, when it verifies it.

    Args:
        reads: Where the bytes go, on this rank.
        wanted: What this rank will read.
        coordinator: How ranks talk.
        doing: What this is part of, for messages.

    Raises:
        CheckpointError: On every rank, if a range cannot be fetched or stored on any.
    """
    mine = set(wanted)
    table = np.array(sorted(mine), dtype=np.int64).reshape(-1, len(FileRange._fields))
    for group in batched(_shared(coordinator.gather_objects(table)), len, _BYTES_AT_ONCE):
        own = [each.range for each in group if each.reader == coordinator.rank]
        on_all_ranks(coordinator, doing, functools.partial(reads.fetch, own))
        received: dict[FileRange, bytes] = {}
        for reader in sorted({each.reader for each in group}):
            data = [reads.file(each.file).read(each.start, each.stop) for each in own]
            sent = coordinator.broadcast_object(data if reader == coordinator.rank else [], src=reader)
            received.update(zip((each.range for each in group if each.reader == reader), sent, strict=True))
        others = {each: data for each, data in received.items() if each in mine and each not in own}
        on_all_ranks(coordinator, doing, functools.partial(reads.put, others))


def _shared(tables: Sequence[npt.NDArray[np.int64]]) -> Iterator[_Shared]:
    """Yield what at least half of the ranks want, with each of these in turn as its reader."""
    ranges, which, counts = np.unique(np.concatenate(tables), axis=0, return_inverse=True, return_counts=True)
    ranks = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    wanting = ranks[np.argsort(which.reshape(-1), kind="stable")]
    first = starts(counts)
    for turn, place in enumerate(np.flatnonzero((counts > 1) & (2 * counts >= len(tables))).tolist()):
        reader = wanting[first[place] + turn % counts[place]]
        yield _Shared(reader=int(reader), range=FileRange(*ranges[place].tolist()))
