"""Merging the indexes of all ranks into one, in a time that allows for thousands of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shard_core.checkpoint.format.chunk_index import COLUMNS, ChunkIndex, Columns, TensorRecord
from shard_core.checkpoint.format.ragged import Piece, RaggedColumn, ranges, starts
from shard_core.checkpoint.save.rank_index import Layout, RankIndex, decode_layout
from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    from shard_core.checkpoint.format.box import Integers
    from shard_core.checkpoint.storage.interface import FileRecord


def merge_rank_indexes(indexes: Iterable[RankIndex]) -> ChunkIndex:
    """Merge what all ranks wrote into one index.

    Args:
        indexes: Each rank's, in rank order.

    Raises:
        CheckpointError: If two ranks disagree about a tensor's dtype or shape.
    """
    return _Merger(indexes).merged()


class _Rank(NamedTuple):
    """What is kept of a rank index: what differs from rank to rank."""

    layout: int
    first_file: int
    offsets: Integers
    digests: npt.NDArray[np.uint64]


class _Merger:
    """Merges in two steps: layouts that many ranks share are decoded once, then each rank's values are placed."""

    def __init__(self, indexes: Iterable[RankIndex]) -> None:
        self._files: list[FileRecord] = []
        self._ranks: list[_Rank] = []
        numbers: dict[bytes, int] = {}
        first_ranks: list[int] = []
        for rank, index in enumerate(indexes):
            if index.layout not in numbers:
                numbers[index.layout] = len(numbers)
                first_ranks.append(rank)
            self._ranks.append(_Rank(numbers[index.layout], len(self._files), index.offsets, index.digests))
            self._files += index.files
        self._layouts = [decode_layout(raw) for raw in numbers]
        self._tensors = _agreed_tensors(first_ranks, self._layouts)

    def merged(self) -> ChunkIndex:
        """Build the columns of all values, in the order of the tensors."""
        position = {tensor.key: place for place, tensor in enumerate(self._tensors)}
        places = [np.array([position[each.key] for each in layout.tensors], dtype=np.int64) for layout in self._layouts]
        tilings, users = self._tilings(places)
        placements = [_Placement(layout, place, tilings) for layout, place in zip(self._layouts, places, strict=True)]
        times = np.bincount([rank.layout for rank in self._ranks], minlength=len(placements)).tolist()
        chunks = RaggedColumn(len(tilings), zip((each.chunks for each in placements), times, strict=True))
        digests = RaggedColumn(len(tilings), zip((each.digests for each in placements), times, strict=True))
        extents = RaggedColumn(len(users), zip((each.extents for each in placements), times, strict=True))
        room = {"file": chunks, "begin": chunks, "digests": digests, "offsets": extents, "sizes": extents}
        columns: Columns = {name: np.empty(len(ragged), dtype=COLUMNS[name]) for name, ragged in room.items()}
        columns |= {"cut": tilings, "rows": starts(chunks.lengths[users])}
        for rank in self._ranks:
            placement, common = placements[rank.layout], self._layouts[rank.layout].columns
            where = chunks.add(placement.chunks)
            columns["file"][where] = common["file"] + rank.first_file
            columns["begin"][where] = common["begin"]
            columns["digests"][digests.add(placement.digests)] = rank.digests
            where = extents.add(placement.extents)
            columns["offsets"][where] = rank.offsets[placement.extents_taken]
            columns["sizes"][where] = common["sizes"][placement.extents_taken]
        return ChunkIndex(self._tensors, self._files, columns)

    def _tilings(self, places: Sequence[Integers]) -> tuple[npt.NDArray[np.int32], list[int]]:
        """Return the number of each tensor's tiling over all ranks, and of each tiling a tensor that has it."""
        table = np.full((len(self._tensors), len(places)), -1, dtype=np.int32)
        for number, (layout, place) in enumerate(zip(self._layouts, places, strict=True)):
            table[place, number] = layout.columns["cut"]
        alike = [(tensor.shape, numbers.tobytes()) for tensor, numbers in zip(self._tensors, table, strict=True)]
        users: dict[tuple[tuple[int, ...], bytes], int] = {}
        for user, kind in enumerate(alike):
            users.setdefault(kind, user)
        numbers = {kind: number for number, kind in enumerate(users)}
        return np.array([numbers[kind] for kind in alike], dtype=np.int32), list(users.values())


class _Placement:
    """Where the values of all ranks of one layout go.

    Attributes:
        chunks: How many chunks there are of which tensors.
        digests: How many digests.
        extents: How many offsets and sizes there are of which tilings.
        extents_taken: Which of the rank's these are: tensors tiled alike on this rank need not be so on others.
    """

    def __init__(self, layout: Layout, place: Integers, tilings: npt.NDArray[np.int32]) -> None:
        own, counts = layout.columns["cut"], np.diff(layout.columns["rows"])
        self.chunks = Piece(place, counts[own])
        self.digests = Piece(place, layout.columns["digest_counts"])
        dims = np.zeros_like(counts)
        dims[own] = [len(tensor.shape) for tensor in layout.tensors]
        extents = counts * dims
        numbers, first_users = np.unique(tilings[place], return_index=True)
        taken = own[first_users]
        self.extents = Piece(numbers, extents[taken])
        self.extents_taken = ranges(starts(extents)[:-1][taken], extents[taken])


def _agreed_tensors(ranks: Sequence[int], layouts: Sequence[Layout]) -> list[TensorRecord]:
    records: dict[str, TensorRecord] = {}
    for rank, layout in zip(ranks, layouts, strict=True):
        for tensor in layout.tensors:
            known = records.setdefault(tensor.key, tensor)
            if known != tensor:
                raise CheckpointError(
                    f"rank {rank} holds {tensor.key!r} as {tensor.dtype} of shape {tensor.shape}, another rank as "
                    f"{known.dtype} of shape {known.shape}; every rank must hold shards of the same model."
                )
    return [records[key] for key in sorted(records)]
