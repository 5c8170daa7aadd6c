"""Safetensors files: written in one stream with digests, read as a map of their bytes."""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import stat
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import xxhash

from shard_core.checkpoint.dtypes import ITEM_SIZES
from shard_core.errors import CheckpointCorrupted, CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

#: One digest guards this many bytes, so that a reader of part of a tensor need not read all of it.
BLOCK_BYTES = 1 << 22
_ALIGNMENT = 64
_STAGED_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        path: Its name in the checkpoint's folder.
        bytes: Its length.
        digest: xxh3 of its header, as 16 hexadecimal digits; the data have digests by block.
    """

    path: str
    bytes: int
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor in a file to be written.

    Attributes:
        name: What readers of the file see.
        dtype: Its type's name in the format.
        shape: Its shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """How much room one element takes."""
        return ITEM_SIZES[self.dtype]

    @property
    def bytes(self) -> int:
        """How much room its elements take."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


class TensorFileWriter:
    """Streams tensors into a new safetensors file; holds at most one small buffer besides them.

    Order of calls: ``write`` once per entry, in the order of the entries, then ``finish``.

    Args:
        path: The file to create; one that exists is unlinked, never written into.
        entries: What will be written; element sizes may not grow from one to the next, which keeps
            every tensor aligned.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        header, self.begins, end = _header(entries)
        self._name = path.name
        self._end = end
        self._header_digest = xxhash.xxh3_64_hexdigest(header)
        self._staged = bytearray(header)
        path.unlink(missing_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def write(self, tensor: torch.Tensor) -> list[int]:
        """Append one tensor.

        Args:
            tensor: What the next entry announced, on any device, with any strides.

        Returns:
            xxh3 of each of its blocks.
        """
        data = tensor_bytes(tensor)
        if len(data) <= _STAGED_BYTES:
            self._staged += data
            if len(self._staged) > BLOCK_BYTES:
                self._flush()
            return [xxhash.xxh3_64_intdigest(data)] if len(data) else []
        self._flush()
        digests = []
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            digests.append(xxhash.xxh3_64_intdigest(block))
            self._put(block)
        return digests

    def finish(self) -> FileRecord:
        """Bring everything to the disk and describe the file."""
        self._flush()
        os.fsync(self._descriptor)
        return FileRecord(path=self._name, bytes=self._end, digest=self._header_digest)

    def _flush(self) -> None:
        self._put(memoryview(self._staged))
        self._staged = bytearray()

    def _put(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]


def _header(entries: Sequence[Entry]) -> tuple[bytes, list[int], int]:
    """Encode the header; also tell where each entry's bytes begin, and where the file ends."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins = []
    end = 0
    for entry in entries:
        if entry.name in table:
            raise CheckpointError(f"two tensors are called {entry.name!r}; give one of them another name.")
        begins.append(end)
        end += entry.bytes
        table[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [begins[-1], end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, [start + begin for begin in begins], start + end


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """View a tensor's elements, in row order, as bytes of host memory; copies only where it must."""
    import torch

    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def open_regular(path: Path) -> int:
    """Open a file of a checkpoint for reading: never through a link, never a pipe or a device.

    Returns:
        A file descriptor, the caller's to close.

    Raises:
        CheckpointCorrupted: If there is no such regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointCorrupted(
            f"{str(path)!r} cannot be opened as a file of a checkpoint: {error.strerror}."
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointCorrupted(f"{str(path)!r} is no regular file, so it is no file of a checkpoint.")
    return descriptor


def open_recorded(folder: Path, record: FileRecord) -> int:
    """Open a file a manifest names, if it is as long as it was when it was committed.

    Returns:
        A file descriptor, the caller's to close.

    Raises:
        CheckpointCorrupted: If it is not there, no regular file, or of another length.
    """
    descriptor = open_regular(folder / record.path)
    length = os.fstat(descriptor).st_size
    if length != record.bytes:
        os.close(descriptor)
        raise CheckpointCorrupted(
            f"{record.path!r} has {length} bytes, but {record.bytes} were committed; it was cut short or replaced."
        )
    return descriptor


def header_is_intact(descriptor: int, record: FileRecord) -> bool:
    """Tell whether a file's header is the one that was written."""
    (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
    header = os.pread(descriptor, 8 + min(length, record.bytes), 0)
    return xxhash.xxh3_64_hexdigest(header) == record.digest


class MappedFile:
    """The bytes of one file of a checkpoint, read only where they are looked at.

    Args:
        folder: The checkpoint.
        record: The file.
    """

    def __init__(self, folder: Path, record: FileRecord) -> None:
        import torch

        descriptor = open_recorded(folder, record)
        try:
            # Private and writable only because torch warns of read-only memory; nobody writes to it.
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            self._map = mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(descriptor)
        self._view = memoryview(self._map)
        self._tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def bytes(self, start: int, stop: int) -> memoryview:
        """View a range of the file."""
        return self._view[start:stop]

    def tensor(self, start: int, stop: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """View a range of the file as a tensor."""
        return self._tensor[start:stop].view(dtype).view(*shape) if shape else self._tensor[start:stop].view(dtype)[0]
