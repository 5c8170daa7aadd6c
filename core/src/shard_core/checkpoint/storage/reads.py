"""Reading files that a manifest names into the caller's memory: a file that is cut short meanwhile is an error.

They are not mapped: where a file ends before its map does, looking at the rest kills the process.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shard_core.errors import CheckpointCorrupted


class FileRange(NamedTuple):
    """Some bytes of one of several files.

    Attributes:
        file: The file, by its place among them.
        start: The first byte.
        stop: The one after the last.
    """

    file: int
    start: int
    stop: int


class OpenedFile:
    """One file, open for reading until nobody has it any more.

    Args:
        descriptor: The file, which is closed with this.
        name: What it is called, for messages.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name
        self._about = self._look()

    def __del__(self) -> None:
        os.close(self._descriptor)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill memory with the bytes that begin at some place.

        Raises:
            CheckpointCorrupted: If the file ends before.
        """
        while buffer:
            count = os.preadv(self._descriptor, [buffer], start)
            if count == 0:
                raise CheckpointCorrupted(f"{self._name!r} ends at byte {start}; it was cut short while it was read.")
            start, buffer = start + count, buffer[count:]

    def read(self, start: int, stop: int) -> bytes:
        """Read a range of it; raises what ``read_into`` raises."""
        data = bytearray(stop - start)
        self.read_into(start, memoryview(data))
        return bytes(data)

    def check_unchanged(self) -> None:
        """Check that it was not written to since it was opened.

        Raises:
            CheckpointCorrupted: If it was, or was cut short.
        """
        if self._look() != self._about:
            raise CheckpointCorrupted(f"{self._name!r} was written to, or cut short, while it was read.")

    def _look(self) -> tuple[int, int]:
        about = os.fstat(self._descriptor)
        return about.st_size, about.st_mtime_ns


class FileReads(abc.ABC):
    """The files that a manifest names; each is opened when it is first needed."""

    @abc.abstractmethod
    def fetch(self, ranges: Iterable[FileRange]) -> None:
        """Fetch bytes to where they can be read; what was not fetched may read as zeros.

        Raises:
            CheckpointCorrupted: If a file is not there, or not as long as it was when it was committed.
        """

    @abc.abstractmethod
    def put(self, fetched: Mapping[FileRange, bytes]) -> None:
        """Store what another rank has fetched; it need not be fetched again."""

    @abc.abstractmethod
    def file(self, number: int) -> OpenedFile:
        """Open one file, once.

        Raises:
            CheckpointCorrupted: If it is not there, or not as long as it was when it was committed.
        """

    @abc.abstractmethod
    def check_unchanged(self) -> None:
        """Check that nothing that was opened was written to.

        Raises:
            CheckpointCorrupted: If something was.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Release what was fetched, when it will not be read any more."""
