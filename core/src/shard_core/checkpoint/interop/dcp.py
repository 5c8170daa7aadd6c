"""Folders of ``torch.distributed.checkpoint``, whatever world has written them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import torch

from shard_core.checkpoint.format.box import Box
from shard_core.checkpoint.interop.dcp_metadata import Chunk, read_metadata
from shard_core.checkpoint.interop.nesting import choose
from shard_core.checkpoint.interop.torch_file import described, load_safely
from shard_core.checkpoint.interop.weights import Layout, Reader, Weights
from shard_core.errors import CheckpointCorrupted

if TYPE_CHECKING:
    from shard_core.checkpoint.interop.source import Source

_ZIP = b"PK\x03\x04"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DCPFolder(Weights):
    """The tensors of one state dict in a folder of ``torch.distributed.checkpoint``.

    A chunk is what one rank has saved of a tensor; one is read as a whole, and one at a time is held in memory.

    Attributes:
        chunks: The chunks of each tensor.
    """

    chunks: Mapping[str, tuple[Chunk, ...]]

    @classmethod
    def of(cls, source: Source, metadata_file: Path, key: str | None) -> Self:
        """Describe a folder.

        Args:
            source: The folder.
            metadata_file: The file in it that has the metadata.
            key: Which state dict in it; None if it is one itself.

        Raises:
            CheckpointCorrupted: If its metadata are not such as torch writes.
            InvalidOption: If the key of a state dict must be given.
        """
        source.fetch(metadata_file)
        metadata = read_metadata(metadata_file)
        places = choose(metadata.entries, key, source.root)
        found = {name: metadata.entries[place] for name, place in places.items()}
        tensors = {name: entry for name, entry in found.items() if isinstance(entry, Layout)}
        return cls(
            path=source.root,
            tensors=tensors,
            others={name: entry for name, entry in found.items() if isinstance(entry, str)},
            chunks={name: metadata.chunks[places[name]] for name in tensors},
        )

    @property
    def places(self) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...], str, int, int]]]:
        """The chunks of each tensor, each by its fields."""
        return {
            name: [(each.box.offsets, each.box.sizes, each.file, each.begin, each.length) for each in chunks]
            for name, chunks in self.chunks.items()
        }

    @classmethod
    def located(cls, places: Mapping[str, Any], **described: Any) -> Self:
        """Return the weights whose ``places`` these are."""
        chunks = {
            name: tuple(
                Chunk(box=Box(offsets, sizes), file=file, begin=begin, length=length)
                for offsets, sizes, file, begin, length in listed
            )
            for name, listed in places.items()
        }
        return cls(chunks=chunks, **described)

    @contextlib.contextmanager
    def opened(self, source: Source) -> Iterator[Reader]:
        """Open a reader, which opens files when a chunk is read."""
        yield _DCPReader(self, source)


class _DCPReader(Reader):
    def __init__(self, weights: DCPFolder, source: Source) -> None:
        self._weights = weights
        self._source = source
        # The chunk that was read last: a rank may need several boxes of one, one after another.
        self._held: tuple[Chunk, torch.Tensor] | None = None

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        for chunk, common in self._common(name, box):
            if self._held is None or self._held[0] != chunk:
                self._held = None  # before the next one takes memory
                self._held = chunk, self._load(name, chunk)
            yield common, self._held[1][common.slices(chunk.box.offsets)]

    def check(self, name: str, box: Box) -> None:
        with torch.serialization.skip_data():
            for chunk, _ in self._common(name, box):
                self._load(name, chunk)

    def _common(self, name: str, box: Box) -> Iterator[tuple[Chunk, Box]]:
        for chunk in self._weights.chunks[name]:
            common = chunk.box.intersection(box)
            if common is not None:
                yield chunk, common

    def _load(self, name: str, chunk: Chunk) -> torch.Tensor:
        path = self._weights.path / chunk.file
        self._source.fetch(path, chunk.begin, chunk.begin + chunk.length)
        # Opened anew: an open file may have buffered bytes of another chunk that were not fetched then.
        with _opened(path) as file:
            return self._weights.checked(name, _load(name, file, chunk), chunk.box.sizes)


def _opened(path: Path) -> BinaryIO:
    if not path.is_file():
        raise CheckpointCorrupted(f"{str(path)!r} is not there, or no regular file; the weights are incomplete.")
    return path.open("rb")


def _load(name: str, file: BinaryIO, chunk: Chunk) -> torch.Tensor:
    owner = f"the part of {name!r} in {file.name!r}"
    if chunk.begin + chunk.length > os.fstat(file.fileno()).st_size:
        raise CheckpointCorrupted(f"{owner} ends behind the end of the file, which was cut short or replaced.")
    stored = _FileRange(file, chunk.begin, chunk.length)
    if stored.read(len(_ZIP)) != _ZIP:
        raise CheckpointCorrupted(f"{owner} was not written by torch.save, the only way of saving that can be read.")
    stored.seek(0)
    tensor: torch.Tensor = load_safely(stored, owner)
    found = described(tensor)
    if isinstance(found, str):
        raise CheckpointCorrupted(f"{owner} is {found}, not a tensor of numbers.")
    return tensor


class _FileRange(io.RawIOBase):
    """A range of a file that can be read like a file of its own."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        super().__init__()
        self._file, self._begin, self._length = file, begin, length
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        return self._place

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]  # all that is ever given
        size = max(0, min(len(buffer), self._length - self._place))
        self._file.seek(self._begin + self._place)
        read = self._file.readinto(memoryview(buffer)[:size])  # type: ignore[attr-defined]
        self._place += read
        return int(read)
