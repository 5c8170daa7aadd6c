"""The index of chunks: which bytes of which file hold which box of which tensor, in columns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from shard_core.checkpoint.format.dtypes import ITEM_SIZES
from shard_core.checkpoint.format.ragged import starts
from shard_core.checkpoint.format.tiling import Tiling
from shard_core.errors import CheckpointCorrupted

if TYPE_CHECKING:
    from shard_core.checkpoint.format.box import Box, Integers
    from shard_core.checkpoint.storage.interface import FileRecord

Columns = dict[str, npt.NDArray[Any]]

#: One digest guards this many bytes, so that a reader of a box of a tensor need not read all of it.
BLOCK_BYTES = 1 << 22

#: Tensors that are tiled alike share a tiling, whose number is in ``cut``. It has ``rows`` boxes (where each tiling's
#: begin, and where the last end), of as many ``offsets`` and ``sizes`` as the tensors have dims. Each tensor has one
#: ``file`` and one ``begin`` per box of its tiling, and as many ``digests`` as these chunks have blocks.
COLUMNS = {"cut": "i4", "rows": "i8", "offsets": "i8", "sizes": "i8", "file": "i4", "begin": "i8", "digests": "u8"}
#: The error of an index in which two chunks hold the same byte.
SHARED_BYTES = "the index of chunks gives some bytes of a file to two chunks."
_OUTSIDE = "the index of chunks points outside a file, or between two elements."


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
        box: Which box of the tensor it is.
        digests: xxh3 of each block of its bytes.
    """

    file: int
    begin: int
    box: Box
    digests: Sequence[int]


class ChunkIndex:
    """Chunks by tensor, a column of integers for each of their properties.

    Args:
        tensors: The full tensors.
        files: The files that ``file`` counts.
        columns: As ``COLUMNS`` says.

    Attributes:
        digest_counts: How many digests each tensor has.

    Raises:
        CheckpointCorrupted: If the columns contradict each other or the tensors.
    """

    def __init__(self, tensors: Sequence[TensorRecord], files: Sequence[FileRecord], columns: Columns) -> None:
        self.tensors = tuple(tensors)
        self.files = tuple(files)
        self.columns = columns
        self._position = {tensor.key: place for place, tensor in enumerate(self.tensors)}
        self._tilings = _tilings(self.tensors, columns)
        self._tiling_of = columns["cut"].tolist()
        self._rows = starts([len(self._tilings[number]) for number in self._tiling_of])
        if not len(columns["file"]) == len(columns["begin"]) == self._rows[-1]:
            raise CheckpointCorrupted("the index of chunks does not say of each chunk where it is.")
        self._digests: dict[tuple[int, int], Integers] = {}
        self.digest_counts = np.array([self._digest_rows(place)[-1] for place in range(len(tensors))], dtype=np.int64)
        self._first_digest = starts(self.digest_counts)
        if len(columns["digests"]) != self._first_digest[-1]:
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

    def record(self, key: str) -> TensorRecord:
        """Return the record of a full tensor."""
        return self.tensors[self._position[key]]

    def chunks(self, key: str) -> Iterator[Chunk]:
        """Yield a tensor's chunks."""
        position = self._position[key]
        for row in range(len(self._tilings[self._tiling_of[position]])):
            yield self._chunk(position, row)

    def overlaps(self, key: str, box: Box) -> Iterator[tuple[Chunk, Box]]:
        """Yield the chunks of a tensor that share elements with a box, and which elements."""
        position = self._position[key]
        for row, common in self._tilings[self._tiling_of[position]].overlaps(box):
            yield self._chunk(position, row), common

    def in_file(self, number: int) -> Iterator[tuple[TensorRecord, Chunk]]:
        """Yield the chunks of one file and their tensors, in the order of their bytes."""
        chunks = np.flatnonzero(self.columns["file"] == number)
        chunks = chunks[np.argsort(self.columns["begin"][chunks], kind="stable")]
        positions = np.searchsorted(self._rows, chunks, side="right") - 1
        for position, row in zip(positions.tolist(), (chunks - self._rows[positions]).tolist(), strict=True):
            yield self.tensors[position], self._chunk(position, row)

    def check_tiling(self) -> None:
        """Check that the chunks tile every tensor.

        Raises:
            CheckpointCorrupted: Naming the first tensor that is not covered exactly once.
        """
        for number, tiling in enumerate(self._tilings):
            flaw = tiling.flaw()
            if flaw:
                key = self.tensors[self._tiling_of.index(number)].key
                raise CheckpointCorrupted(f"{key!r} of shape {tiling.shape} is not covered exactly once: {flaw}.")

    def check_places(self) -> None:
        """Check that all chunks lie in files, and that no byte of a file belongs to two.

        That looks at each of millions of chunks. Who reads some of them need not check all: no method returns a chunk
        that does not lie in a file.

        Raises:
            CheckpointCorrupted: If it is not so.
        """
        file, begin = self.columns["file"], self.columns["begin"]
        if ((file < 0) | (file >= len(self.files))).any():
            raise CheckpointCorrupted(_OUTSIDE)
        lengths = [record.bytes for record in self.files]
        if sum(lengths) > np.iinfo(np.int64).max:
            raise CheckpointCorrupted("the manifest claims more bytes than files can have.")
        sizes = self._chunk_bytes()
        room = np.array(lengths, dtype=np.int64)[file] - sizes
        items = np.repeat([ITEM_SIZES[tensor.dtype] for tensor in self.tensors], np.diff(self._rows))
        if ((begin < 0) | (begin > room) | (begin % items != 0)).any():
            raise CheckpointCorrupted(_OUTSIDE)
        del room, items
        # With all files in a row no chunk begins before the one before it has ended: then each begins after as
        # many have ended as there are before it, which takes no pairing of begins with ends.
        first = (starts(lengths)[file] + begin)[sizes > 0]
        last = first + sizes[sizes > 0]
        first.sort()
        last.sort()
        if (first[1:] < last[:-1]).any():
            raise CheckpointCorrupted(SHARED_BYTES)

    def _chunk(self, position: int, row: int) -> Chunk:
        at = self._rows[position] + row
        file, begin = int(self.columns["file"][at]), int(self.columns["begin"][at])
        box, item = self._tilings[self._tiling_of[position]].box(row), ITEM_SIZES[self.tensors[position].dtype]
        in_file = 0 <= file < len(self.files) and 0 <= begin <= self.files[file].bytes - box.volume * item
        if not in_file or begin % item:
            raise CheckpointCorrupted(_OUTSIDE)
        digests = self._digest_rows(position)[row : row + 2] + self._first_digest[position]
        return Chunk(file=file, begin=begin, box=box, digests=self.columns["digests"][slice(*digests)].tolist())

    def _digest_rows(self, position: int) -> Integers:
        """Return where the digests of a tensor's chunks begin among the tensor's."""
        kind = self._tiling_of[position], ITEM_SIZES[self.tensors[position].dtype]
        if kind not in self._digests:
            self._digests[kind] = starts(-(-self._tilings[kind[0]].volumes * kind[1] // BLOCK_BYTES))
        return self._digests[kind]

    def _chunk_bytes(self) -> Integers:
        sizes = np.empty(len(self), dtype=np.int64)
        for position, tensor in enumerate(self.tensors):
            volumes = self._tilings[self._tiling_of[position]].volumes
            sizes[self._rows[position] : self._rows[position + 1]] = volumes * ITEM_SIZES[tensor.dtype]
        return sizes


def _tilings(tensors: Sequence[TensorRecord], columns: Columns) -> list[Tiling]:
    """Return the tilings of the tensors.

    Raises:
        CheckpointCorrupted: If the columns contradict each other or the tensors.
    """
    rows = columns["rows"]
    numbers, users = np.unique(columns["cut"], return_index=True)
    if len(columns["cut"]) != len(tensors) or len(rows) != len(numbers) + 1:
        raise CheckpointCorrupted("the index of chunks is of other tensors than the manifest names.")
    counts = np.diff(rows)
    strange = (numbers != np.arange(len(numbers))).any() or rows[0] != 0
    if strange or ((counts < 0) | (counts > len(columns["file"]))).any():
        raise CheckpointCorrupted("the index of chunks does not say which chunks belong to which tensor.")
    shapes = [tensors[user].shape for user in users.tolist()]
    ends = starts(counts * np.array([len(shape) for shape in shapes], dtype=np.int64))
    if not len(columns["offsets"]) == len(columns["sizes"]) == ends[-1]:
        raise CheckpointCorrupted("the index of chunks does not hold one box per chunk.")
    for tensor, number in zip(tensors, columns["cut"].tolist(), strict=True):
        if tensor.shape != shapes[number]:
            raise CheckpointCorrupted(f"{tensor.key!r} is tiled as only a tensor of another shape can be.")
    tilings = [
        Tiling(shape, *(columns[name][begin:end].reshape(count, len(shape)) for name in ("offsets", "sizes")))
        for shape, begin, end, count in zip(shapes, ends[:-1], ends[1:], counts.tolist(), strict=True)
    ]
    for tiling, user in zip(tilings, users.tolist(), strict=True):
        if not tiling.fits():
            raise CheckpointCorrupted(f"a chunk of {tensors[user].key!r} is larger than the tensor.")
    return tilings


def decode_columns(raw: bytes, columns: dict[str, str]) -> Columns:
    """Read one-dimensional arrays of given names and types from a safetensors file.

    Raises:
        CheckpointCorrupted: If the bytes are no such file.
    """
    try:
        found: Columns = safetensors.numpy.load(raw)
    except safetensors.SafetensorError as error:
        raise CheckpointCorrupted(f"the index of chunks is no safetensors file: {error}.") from error
    except KeyError as error:
        raise CheckpointCorrupted(f"the index of chunks has a column of type {error}, which no column has.") from error
    kinds = {name: column.dtype.str[1:] for name, column in found.items() if column.ndim == 1}
    if kinds != columns or len(found) != len(columns):
        raise CheckpointCorrupted("the index of chunks does not have the columns it must have.")
    return found
