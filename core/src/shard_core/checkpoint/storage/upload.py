"""Uploading a file to a store while it is being written."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from shard_core.checkpoint.storage.interface import NewFile
from shard_core.checkpoint.storage.requests import storage_errors
from shard_core.errors import StorageError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_PART_BYTES = 1 << 25
#: Stores take 10,000 parts at most.
_MOST_PARTS = 9_000


class Upload(NewFile):
    """An object that is sent in parts, and appears when it is finished.

    Args:
        filesystem: The store.
        key: What the store will call it.
        url: What its user calls it, for messages.
        size: How long it will be.
    """

    def __init__(self, filesystem: AbstractFileSystem, key: str, url: str, size: int) -> None:
        self._url = url
        self._finished = False
        enlarged = 1 + size // (_PART_BYTES * _MOST_PARTS)
        with storage_errors(url):
            self._file = filesystem.open(key, "wb", block_size=_PART_BYTES * enlarged)

    def write(self, data: memoryview) -> None:
        """Append all of some bytes."""
        with storage_errors(self._url):
            self._file.write(data)

    def finish(self) -> None:
        """Complete the upload, so that the object appears."""
        with storage_errors(self._url):
            self._file.close()
        self._finished = True

    def close(self) -> None:
        """Close it; an unfinished one never appears."""
        from fsspec.spec import AbstractBufferedFile

        if self._finished:
            return
        # What made it fail was raised before; a store discards parts that are never completed.
        with contextlib.suppress(StorageError, FileNotFoundError), storage_errors(self._url):
            self._file.discard()
        if isinstance(self._file, AbstractBufferedFile):
            # Else it would send what it still holds when it is collected, and make an object of it.
            self._file.closed = True
