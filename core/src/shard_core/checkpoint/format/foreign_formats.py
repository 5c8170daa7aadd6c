"""The formats that other libraries write weights in, recognized by how files begin (``interop`` reads them)."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

METADATA_NAME = ".metadata"
INDEX_SUFFIX = ".safetensors.index.json"
#: As much as shows what a file is.
BEGINNING_BYTES = 9


def holds_weights(path: Path) -> bool:
    """Return whether a path holds weights in a foreign format, as far as can be seen without reading them."""
    if path.is_dir():
        return is_distributed(path) or any(path.glob(f"*{INDEX_SUFFIX}")) or (path / "model.safetensors").is_file()
    return path.is_file() and (is_zip(path) or is_safetensors(path))


def is_distributed(path: Path) -> bool:
    """Return whether a folder is one of ``torch.distributed.checkpoint``."""
    return (path / METADATA_NAME).is_file()


def is_zip(path: Path) -> bool:
    """Return whether a file begins as those of ``torch.save`` do."""
    return beginning(path, 4) == b"PK\x03\x04"


def is_safetensors(path: Path) -> bool:
    """Return whether a file begins as a safetensors file does."""
    start = beginning(path, BEGINNING_BYTES)
    return (
        len(start) == BEGINNING_BYTES and start[8:] == b"{" and struct.unpack("<Q", start[:8])[0] <= path.stat().st_size
    )


def beginning(path: Path, length: int) -> bytes:
    """Read the first bytes of a file."""
    with path.open("rb") as file:
        return file.read(length)
