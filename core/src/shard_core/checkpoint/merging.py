"""Joining the parts of all ranks into one index, in a time that allows for thousands of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shard_core.checkpoint.index import COLUMNS, ChunkIndex, Columns, TensorRecord, starts
from shard_core.checkpoint.part import Part, decode_tensors
from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    from shard_core.checkpoint.box import Integers
    from shard_core.checkpoint.storage.record import FileRecord

_OF_CHUNKS = ("offsets", "sizes", "file", "begin", "digests")


def merge_parts(parts: Iterable[Part]) -> ChunkIndex:
    """Join what all ranks wrote into one index.

    Args:
        parts: Each rank's, in rank order.

    Raises:
        CheckpointError: If two ranks disagree about a tensor's dtype or shape.
    """
    return _Merger(parts).index()


class _Merger:
    """The tables of one merge, by tensor and rank; the work is done by columns, never chunk by chunk."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._files: list[FileRecord] = []
        streams = {name: bytearray() for name in _OF_CHUNKS}
        kept = []
        for part in parts:
            part.columns["file"] = part.columns["file"] + np.int32(len(self._files))
            self._files += part.files
            for name, stream in streams.items():
                stream.extend(part.columns.pop(name).data)  # taken out: of millions of chunks there must be one copy
            kept.append(part)
        self._joined = {name: np.frombuffer(stream, dtype=COLUMNS[name]) for name, stream in streams.items()}
        self._tabulate(kept)

    def _tabulate(self, parts: Sequence[Part]) -> None:
        """Put the parts' cuts one after another, and note which of them each tensor has on each rank, if any."""
        known = {raw: decode_tensors(raw) for raw in {part.tensors for part in parts}}
        self._tensors = _agreed_tensors([known[part.tensors] for part in parts])
        position = {tensor.key: place for place, tensor in enumerate(self._tensors)}
        places = {raw: _integers(position[each.key] for each in tensors) for raw, tensors in known.items()}
        dims = {raw: _integers(len(each.shape) for each in tensors) for raw, tensors in known.items()}
        self._counts = np.concatenate([np.diff(part.columns["rows"]) for part in parts])
        self._dims = np.empty(len(self._counts), dtype=np.int64)
        self._cut = np.full((len(self._tensors), len(parts)), -1, dtype=np.int32)
        self._digest_counts = np.zeros((len(parts), len(self._tensors)), dtype=np.int32)
        first = 0
        for rank, part in enumerate(parts):
            cut, place = part.columns["cut"], places[part.tensors]
            self._cut[place, rank] = first + cut
            self._dims[first + cut] = dims[part.tensors]
            self._digest_counts[rank, place] = part.columns["digest_counts"]
            first += len(part.columns["rows"]) - 1

    def index(self) -> ChunkIndex:
        """Put all columns into the order of the tensors."""
        columns = self._cut_columns()
        counts = np.append(self._counts, 0)[self._cut.T]  # a tensor that a rank does not name has no chunks there
        order = list(_runs_by_column(counts))
        columns["file"] = _gathered(self._joined.pop("file"), order)
        columns["begin"] = _gathered(self._joined.pop("begin"), order)
        del counts, order
        columns["digests"] = _gathered(self._joined.pop("digests"), list(_runs_by_column(self._digest_counts)))
        return ChunkIndex(self._tensors, self._files, columns)

    def _cut_columns(self) -> Columns:
        """Find out which tensors are cut alike on all ranks together."""
        alike = [(tensor.shape, cuts.tobytes()) for tensor, cuts in zip(self._tensors, self._cut, strict=True)]
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(alike))}
        users = [alike.index(kind) for kind in numbers]
        cuts = [self._cut[user][self._cut[user] >= 0] for user in users]
        extents = _ragged(self._counts * self._dims, np.concatenate(cuts)) if cuts else np.empty(0, dtype=np.int64)
        return {
            "cut": np.array([numbers[kind] for kind in alike], dtype=np.int32),
            "rows": starts([int(self._counts[each].sum()) for each in cuts]),
            "offsets": self._joined.pop("offsets")[extents],
            "sizes": self._joined.pop("sizes")[extents],
        }


def _agreed_tensors(lists: Sequence[tuple[TensorRecord, ...]]) -> list[TensorRecord]:
    records: dict[str, TensorRecord] = {}
    for rank, (before, tensors) in enumerate(itertools.pairwise([(), *lists])):
        for tensor in tensors if tensors is not before else ():
            known = records.setdefault(tensor.key, tensor)
            if known != tensor:
                raise CheckpointError(
                    f"rank {rank} holds {tensor.key!r} as {tensor.dtype} of shape {tensor.shape}, another rank as "
                    f"{known.dtype} of shape {known.shape}; every rank must hold parts of the same model."
                )
    return [records[key] for key in sorted(records)]


def _integers(values: Iterable[int]) -> Integers:
    return np.fromiter(values, dtype=np.int64)


def _runs_by_column(lengths: npt.NDArray[Any]) -> Iterable[Integers]:
    """Tell, column by column, where the elements of runs stand that lie one after another row by row.

    Example:
        >>> [each.tolist() for each in _runs_by_column(np.array([[2, 1], [0, 2]]))]
        [[0, 1], [2, 3, 4]]
    """
    begins = starts(lengths.ravel())[:-1].reshape(lengths.shape)
    for column in range(lengths.shape[1]):
        yield _ranges(begins[:, column], lengths[:, column])


def _gathered(values: Integers, places: Sequence[Integers]) -> Integers:
    """Take values by runs of places; the result alone takes memory."""
    taken = np.empty(sum(map(len, places)), dtype=values.dtype)
    end = 0
    for each in places:
        begin, end = end, end + len(each)
        np.take(values, each, out=taken[begin:end])
    return taken


def _ragged(lengths: Integers, order: Integers) -> Integers:
    """Tell where the elements of runs of unlike lengths stand once the runs are re-ordered."""
    return _ranges(starts(lengths)[:-1][order], lengths[order])


def _ranges(begins: Integers, lengths: Integers) -> Integers:
    """Count up from each of several numbers, as often as told."""
    places: Integers = np.repeat(begins - starts(lengths)[:-1], lengths) + np.arange(int(lengths.sum()))
    return places
