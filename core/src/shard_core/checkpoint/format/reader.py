"""Reading boxes of tensors out of a checkpoint's files, digests first."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import xxhash

from shard_core.checkpoint.format.box import Box
from shard_core.checkpoint.format.chunk_index import BLOCK_BYTES, SHARED_BYTES
from shard_core.checkpoint.format.dtypes import ITEM_SIZES, torch_dtype
from shard_core.checkpoint.storage.reads import FileRange
from shard_core.errors import CheckpointCorrupted

if TYPE_CHECKING:
    from shard_core.checkpoint.format.chunk_index import Chunk, ChunkIndex
    from shard_core.checkpoint.storage.interface import Folder
    from shard_core.checkpoint.storage.reads import FileReads

_LISTED = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Read:
    """What a box needs of one chunk.

    Attributes:
        key: The tensor.
        chunk: Where it is stored.
        box: What is needed, as a box of the full tensor.
    """

    key: str
    chunk: Chunk
    box: Box


class TensorReader:
    """Reads tensors of one checkpoint, and of its files only the bytes that are needed.

    Args:
        folder: The checkpoint.
        index: Where its tensors are.
    """

    def __init__(self, folder: Folder, index: ChunkIndex) -> None:
        self._index = index
        self._files = folder.reads(index.files)
        # For digests, and for what does not lie in memory as in its file; it stays in the processor's cache.
        self._staging = memoryview(bytearray(BLOCK_BYTES))

    def plan(self, key: str, box: Box) -> list[Read]:
        """Return what must be read for a box of a tensor."""
        return [Read(key=key, chunk=chunk, box=common) for chunk, common in self._index.overlaps(key, box)]

    def check_disjoint(self, reads: Iterable[Read]) -> None:
        """Check that no byte about to be read belongs to two chunks.

        Raises:
            CheckpointCorrupted: If one does.
        """
        chunks = {
            (
                read.chunk.file,
                read.chunk.begin,
                read.chunk.begin + self._chunk_bytes(read),
                read.key,
                read.chunk.box.offsets,
            )
            for read in reads
        }
        for (file, _, end, *_), (other, begin, *_) in itertools.pairwise(sorted(chunks)):
            if file == other and begin < end:
                raise CheckpointCorrupted(SHARED_BYTES)

    @property
    def files(self) -> FileReads:
        """The checkpoint's files."""
        return self._files

    def ranges(self, reads: Iterable[Read]) -> list[FileRange]:
        """List the ranges of bytes that ``verify`` will read."""
        return list(self._blocks_of(reads))

    def verify(self, reads: Iterable[Read]) -> None:
        """Fetch the bytes about to be read, and compare them with their digests.

        Raises:
            CheckpointCorrupted: Naming the tensors whose bytes are not those that were saved.
        """
        reads = list(reads)
        needed = self._blocks_of(reads)
        self._files.fetch(needed)
        for number in {read.chunk.file for read in reads}:
            self._files.file(number)  # opened before anything is touched, even for what has no bytes
        damaged: dict[str, str] = {}
        for (file, begin, end), (key, digest) in needed.items():
            block = self._staging[: end - begin]
            self._files.file(file).read_into(begin, block)
            if xxhash.xxh3_64_intdigest(block) != digest:
                damaged[key] = self._index.files[file].path
        if damaged:
            raise CheckpointCorrupted(damage_sentence(list(damaged.items())))

    def check_unchanged(self) -> None:
        """Check that the files were not written to since they were opened.

        Raises:
            CheckpointCorrupted: If one was.
        """
        self._files.check_unchanged()

    def read_into(self, target: torch.Tensor, read: Read) -> None:
        """Copy what was planned into a tensor of its shape; its digest is not checked."""
        first, last = read.box.span(read.chunk.box)
        dtype = torch_dtype(self._index.record(read.key).dtype)
        as_stored = target.is_cpu and target.dtype == dtype and not (target.is_conj() or target.is_neg())
        as_stored = as_stored and target.is_contiguous() and not target.is_inference()
        if as_stored and last - first == read.box.volume:
            # Nothing else shows that memory was written to: not to autograd, not to engines that look for changes.
            torch.autograd.graph.increment_version(target)
            elements = target.detach().view(-1).view(torch.uint8).numpy().data
            self._files.file(read.chunk.file).read_into(read.chunk.begin + first * dtype.itemsize, elements)
            return
        for piece, stored in self.pieces(read):
            target[piece.slices(read.box.offsets)].copy_(stored)

    def pieces(self, read: Read) -> Iterator[tuple[Box, torch.Tensor]]:
        """Read what was planned, a little at a time; its digest is not checked.

        Yields:
            Boxes that tile it, and their elements, which are valid until the next.
        """
        dtype = torch_dtype(self._index.record(read.key).dtype)
        file, whole = self._files.file(read.chunk.file), read.chunk.box
        strides = [math.prod(whole.sizes[dim + 1 :]) for dim in range(len(whole.sizes))]
        for piece in read.box.pieces(whole, len(self._staging) // dtype.itemsize):
            first, last = piece.span(whole)
            stored = self._staging[: (last - first) * dtype.itemsize]
            file.read_into(read.chunk.begin + first * dtype.itemsize, stored)
            yield piece, torch.frombuffer(stored, dtype=dtype).as_strided(piece.sizes, strides)

    def view(self, read: Read) -> torch.Tensor:
        """Read what was planned into host memory; its digest is not checked."""
        tensor = torch.empty(read.box.sizes, dtype=torch_dtype(self._index.record(read.key).dtype))
        self.read_into(tensor, read)
        return tensor

    def full(self, key: str) -> torch.Tensor:
        """Read a whole tensor into host memory, verified."""
        record = self._index.record(key)
        tensor = torch.empty(record.shape, dtype=torch_dtype(record.dtype))
        reads = self.plan(key, Box.whole(record.shape))
        self.verify(reads)
        for read in reads:
            self.read_into(tensor[read.box.slices((0,) * tensor.dim())], read)
        return tensor

    def release(self) -> None:
        """Release what was fetched, before more is."""
        self._files.release()

    def _blocks_of(self, reads: Iterable[Read]) -> dict[FileRange, tuple[str, int]]:
        """Return which blocks are needed, the tensor each belongs to, and its digest."""
        needed: dict[FileRange, tuple[str, int]] = {}
        for read in reads:
            end = read.chunk.begin + self._chunk_bytes(read)
            first, last = self._blocks(read)
            for block in range(first, last):
                begin = read.chunk.begin + block * BLOCK_BYTES
                where = FileRange(read.chunk.file, begin, min(begin + BLOCK_BYTES, end))
                needed[where] = read.key, read.chunk.digests[block]
        return needed

    def _chunk_bytes(self, read: Read) -> int:
        return read.chunk.box.volume * ITEM_SIZES[self._index.record(read.key).dtype]

    def _blocks(self, read: Read) -> tuple[int, int]:
        """Return which of a chunk's blocks hold the bytes between the first and the last element read."""
        first, last = read.box.span(read.chunk.box)
        item = ITEM_SIZES[self._index.record(read.key).dtype]
        return first * item // BLOCK_BYTES, (last * item - 1) // BLOCK_BYTES + 1


def damage_sentence(damaged: Sequence[tuple[str, str]]) -> str:
    """Return a sentence that names tensors whose bytes are not those that were saved.

    Args:
        damaged: Tensors and the files they are in.

    Example:
        >>> damage_sentence([("model.w", "model-00000-of-00001.safetensors")])
        "1 tensor is damaged: 'model.w' in model-00000-of-00001.safetensors; load another checkpoint."
    """
    shown = ", ".join(f"{key!r} in {file}" for key, file in damaged[:_LISTED])
    more = f" and {len(damaged) - _LISTED} more" if len(damaged) > _LISTED else ""
    count = "1 tensor is" if len(damaged) == 1 else f"{len(damaged)} tensors are"
    return f"{count} damaged: {shown}{more}; load another checkpoint."
