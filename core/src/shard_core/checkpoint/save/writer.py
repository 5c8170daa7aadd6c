"""How a shard file is written: a safetensors file, in one stream, with digests of what it holds."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import xxhash

from shard_core.checkpoint.format.chunk_index import BLOCK_BYTES
from shard_core.checkpoint.format.dtypes import ITEM_SIZES
from shard_core.checkpoint.storage.interface import FileRecord
from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from shard_core.checkpoint.storage.interface import Folder

_ALIGNMENT = 64
_STAGED_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor in a file to be written.

    Attributes:
        name: Its name in the file.
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
    """Streams tensors into a new safetensors file; buffers little besides them.

    Order of calls: ``write`` once per entry, in the order of the entries, then ``finish``.

    Args:
        folder: Where the file is to be.
        name: What it is to be called; one that exists is replaced, never written into.
        entries: What will be written; element sizes may not grow from one to the next, which keeps
            every tensor aligned.

    Attributes:
        begins: Where in the file each entry's bytes begin.
        record: What the file will be.
    """

    def __init__(self, folder: Folder, name: str, entries: Sequence[Entry]) -> None:
        header, self.begins, end = _header(entries)
        self.record = FileRecord(path=name, bytes=end, digest=xxhash.xxh3_64_hexdigest(header))
        self._staged = bytearray(header)
        self._file = folder.create(name, end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, tensor: torch.Tensor) -> list[int]:
        """Append one tensor.

        Args:
            tensor: What the next entry describes, on any device, with any strides.

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
            self._file.write(block)
        return digests

    def finish(self) -> None:
        """Write everything so that it outlasts a loss of power."""
        self._flush()
        self._file.finish()

    def complete(self) -> None:
        """Finish and close it; a task for a background thread."""
        with self:
            self.finish()

    def _flush(self) -> None:
        self._file.write(memoryview(self._staged))
        self._staged = bytearray()


def _header(entries: Sequence[Entry]) -> tuple[bytes, list[int], int]:
    """Return the encoded header, where each entry's bytes begin, and where the file ends."""
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
    rows = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = rows.as_strided((rows.numel(),), (1,))  # a single element may have any stride
    return flat.view(torch.uint8).numpy().data
