"""The index of chunks: which bytes of which file hold which box of which tensor, in columns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from shard_core.checkpoint.box import Box, Integers, tiling_flaw
from shard_core.checkpoint.dtypes import ITEM_SIZES
from shard_core.checkpoint.tensor_file import BLOCK_BYTES, FileRecord
from shard_core.errors import CheckpointCorrupted

Columns = dict[str, npt.NDArray[Any]]

#: ``rows`` says where each tensor's chunks begin (one more than there are tensors); ``offsets`` and
#: ``sizes`` hold as many integers per chunk as its tensor has dims, ``digests`` as many as it has blocks.
COLUMNS = {"rows": "i8", "file": "i4", "begin": "i8", "offsets": "i8", "sizes": "i8", "digests": "u8"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """One full tensor of a checkpoint.

    Attributes:
        key: Its name.
        dtype: Its type's name in safetensors files.
        shape: Its shape.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """How much room its elements take."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """One box of one tensor in one file.

    Attributes:
        file: The file, by its place in the index.
        begin: Where the box's elements begin in the file.
        box: Which part of the tensor it is.
        digests: xxh3 of each block of its bytes.
    """

    file: int
    begin: int
    box: Box
    digests: Sequence[int]


class ChunkIndex:
    """Chunks sorted by tensor, a column of integers for each of their properties.

    Args:
        tensors: The full tensors, in the order of ``rows``.
        files: The files that ``file`` counts.
        columns: As ``COLUMNS`` says.

    Raises:
        CheckpointCorrupted: If the columns contradict each other or the tensors.
    """

    def __init__(self, tensors: Sequence[TensorRecord], files: Sequence[FileRecord], columns: Columns) -> None:
        self.tensors = tuple(tensors)
        self.files = tuple(files)
        self.columns = columns
        self._position = {tensor.key: place for place, tensor in enumerate(self.tensors)}
        self.counts = self._check_rows()
        self._extent_rows = starts(self.counts * [len(tensor.shape) for tensor in self.tensors])
        if not len(columns["offsets"]) == len(columns["sizes"]) == self._extent_rows[-1]:
            raise CheckpointCorrupted("the index of chunks does not hold one box per chunk.")
        self.bytes = self._chunk_bytes()
        self.digest_rows = starts(self.blocks)
        if len(columns["digests"]) != self.digest_rows[-1]:
            raise CheckpointCorrupted("the index of chunks does not hold one digest per block.")

    @classmethod
    def from_bytes(cls, raw: bytes, tensors: Sequence[TensorRecord], files: Sequence[FileRecord]) -> ChunkIndex:
        """Decode what ``to_bytes`` encoded.

        Raises:
            CheckpointCorrupted: If these are not such bytes, or not of these tensors.
        """
        return cls(tensors, files, decode_columns(raw, COLUMNS))

    def to_bytes(self) -> bytes:
        """Encode the columns as a safetensors file."""
        return safetensors.numpy.save(self.columns)

    def __contains__(self, key: str) -> bool:
        return key in self._position

    def __len__(self) -> int:
        """Count the chunks."""
        return len(self.columns["file"])

    @property
    def blocks(self) -> Integers:
        """How many digests each chunk has."""
        return -(-self.bytes // BLOCK_BYTES)

    def record(self, key: str) -> TensorRecord:
        """Describe a full tensor."""
        return self.tensors[self._position[key]]

    def chunks(self, key: str, within: Box | None = None) -> Iterator[Chunk]:
        """Give a tensor's chunks.

        Args:
            key: The tensor.
            within: Only those that share an element with this box.
        """
        position = self._position[key]
        rows = np.arange(self.columns["rows"][position], self.columns["rows"][position + 1])
        offsets, sizes = self._extents(position)
        if within is not None:
            first = np.asarray(within.offsets, dtype=np.int64)
            end = first + np.asarray(within.sizes, dtype=np.int64)
            meets = ((offsets < end) & (offsets + sizes > first)).all(axis=1)
            rows, offsets, sizes = rows[meets], offsets[meets], sizes[meets]
        for row, offset, size in zip(rows.tolist(), offsets.tolist(), sizes.tolist(), strict=True):
            yield Chunk(
                file=int(self.columns["file"][row]),
                begin=int(self.columns["begin"][row]),
                box=Box(tuple(offset), tuple(size)),
                digests=self.columns["digests"][self.digest_rows[row] : self.digest_rows[row + 1]].tolist(),
            )

    def check(self) -> None:
        """Prove that the chunks tile every tensor and that no byte of a file belongs to two.

        Raises:
            CheckpointCorrupted: Naming the first tensor or file that is wrong.
        """
        for position, tensor in enumerate(self.tensors):
            flaw = tiling_flaw(tensor.shape, *self._extents(position))
            if flaw:
                raise CheckpointCorrupted(
                    f"{tensor.key!r} of shape {tensor.shape} is not covered exactly once: {flaw}."
                )
        file, begin = self.columns["file"].astype(np.int64), self.columns["begin"]
        if ((file < 0) | (file >= len(self.files))).any():
            raise CheckpointCorrupted("the index of chunks points to a file that the manifest does not name.")
        lengths = np.array([record.bytes for record in self.files], dtype=np.int64)
        items = np.repeat([ITEM_SIZES[tensor.dtype] for tensor in self.tensors], self.counts)
        if ((begin < 0) | (begin > lengths[file] - self.bytes) | (begin % items != 0)).any():
            raise CheckpointCorrupted("the index of chunks points outside a file, or between two elements.")
        order = np.lexsort((begin + self.bytes, begin, file))
        ends = (begin + self.bytes)[order]
        if ((np.diff(file[order]) == 0) & (begin[order][1:] < ends[:-1])).any():
            raise CheckpointCorrupted("the index of chunks gives some bytes of a file to two chunks.")

    def _check_rows(self) -> Integers:
        rows, number = self.columns["rows"], len(self.columns["file"])
        if len(rows) != len(self.tensors) + 1 or len(self.columns["begin"]) != number:
            raise CheckpointCorrupted("the index of chunks is of other tensors than the manifest names.")
        counts: Integers = np.diff(rows)
        if rows[0] != 0 or rows[-1] != number or (counts < 0).any():
            raise CheckpointCorrupted("the index of chunks does not say which chunks belong to which tensor.")
        return counts

    def _extents(self, position: int) -> tuple[Integers, Integers]:
        span = slice(self._extent_rows[position], self._extent_rows[position + 1])
        shape = (int(self.counts[position]), len(self.tensors[position].shape))
        return self.columns["offsets"][span].reshape(shape), self.columns["sizes"][span].reshape(shape)

    def _chunk_bytes(self) -> Integers:
        volumes = [np.empty(0, dtype=np.int64)]
        for position, tensor in enumerate(self.tensors):
            sizes = self._extents(position)[1]
            # Checked before they are multiplied: the product of two wild sizes may look harmless.
            if ((sizes < 0) | (sizes > np.asarray(tensor.shape, dtype=np.int64))).any():
                raise CheckpointCorrupted(f"a chunk of {tensor.key!r} is larger than the tensor.")
            volumes.append(sizes.prod(axis=1, dtype=np.int64) * ITEM_SIZES[tensor.dtype])
        return np.concatenate(volumes)


def starts(counts: npt.ArrayLike) -> Integers:
    """Tell where each of several runs begins, and where the last ends.

    Example:
        >>> starts([2, 0, 3]).tolist()
        [0, 2, 2, 5]
    """
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


def decode_columns(raw: bytes, columns: dict[str, str]) -> Columns:
    """Read one-dimensional arrays of given names and types from a safetensors file.

    Raises:
        CheckpointCorrupted: If the bytes are no such file.
    """
    try:
        found: Columns = safetensors.numpy.load(raw)
    except safetensors.SafetensorError as error:
        raise CheckpointCorrupted(f"the index of chunks is no safetensors file: {error}.") from error
    kinds = {name: column.dtype.str[1:] for name, column in found.items() if column.ndim == 1}
    if kinds != columns or len(found) != len(columns):
        raise CheckpointCorrupted("the index of chunks does not have the columns it must have.")
    return found
