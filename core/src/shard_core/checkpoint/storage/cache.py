"""A cache of a store's objects on a local disk, for as long as they are read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from shard_core.checkpoint.storage.reads import FileRange, FileReads, OpenedFile
from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    from shard_core.checkpoint.storage.interface import FileRecord
    from shard_core.checkpoint.storage.remote import RemoteFolder

#: What one request asks for at most: several together are faster than a long one.
_REQUEST_BYTES = 1 << 23


class CachedReads(FileReads):
    """Anonymous local files, as long as the objects, with holes where nothing was fetched.

    Neither memory nor disk holds more than was fetched and not yet released, and a process that dies leaves nothing.

    Args:
        folder: Where the objects are.
        records: The objects.
    """

    def __init__(self, folder: RemoteFolder, records: Sequence[FileRecord]) -> None:
        self._folder = folder
        self._records = records
        self._copies: dict[int, _Copy] = {}
        self._here: set[FileRange] = set()
        self._checked: set[int] = set()

    def fetch(self, ranges: Iterable[FileRange]) -> None:
        """Fetch bytes from the store, those that adjoin in one request."""
        lacking = set(ranges) - self._here
        requests = list(_requests(lacking))
        unchecked = sorted({each.file for each in requests} - self._checked)
        self._folder.check([self._records[number] for number in unchecked])
        self._checked.update(unchecked)
        wanted = ((self._records[each.file].path, each.start, each.stop) for each in requests)
        for each, data in zip(requests, self._folder.fetch(wanted), strict=True):
            self._copy(each.file).put(each.start, data)
        self._here |= lacking

    def put(self, fetched: Mapping[FileRange, bytes]) -> None:
        """Write what another rank has fetched."""
        for each, data in fetched.items():
            self._copy(each.file).put(each.start, data)
        self._here.update(fetched)

    def file(self, number: int) -> OpenedFile:
        """Open what was fetched of one object."""
        return self._copy(number)

    def check_unchanged(self) -> None:
        """Do nothing: nobody else has a name for these files."""

    def release(self) -> None:
        """Release the room on the disk."""
        self._copies.clear()
        self._here.clear()

    def _copy(self, number: int) -> _Copy:
        if number not in self._copies:
            self._copies[number] = _Copy(self._records[number])
        return self._copies[number]


class _Copy(OpenedFile):
    """What was fetched of one object."""

    def __init__(self, record: FileRecord) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(record.bytes)
            super().__init__(os.dup(file.fileno()), record.path)

    def put(self, start: int, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                count = os.pwrite(self._descriptor, left, start)
                start, left = start + count, left[count:]
        except OSError as error:
            raise CheckpointError(
                f"what is read from a store passes through {tempfile.gettempdir()!r}, which refuses: "
                f"{error.strerror}; set TMPDIR to a folder with room for what one rank reads."
            ) from error


def _requests(ranges: Iterable[FileRange]) -> Iterator[FileRange]:
    """Join ranges that adjoin, and split what is long.

    Example:
        >>> list(_requests([FileRange(0, 8, 9), FileRange(0, 4, 8), FileRange(1, 0, 5)]))
        [FileRange(file=0, start=4, stop=9), FileRange(file=1, start=0, stop=5)]
    """
    joined: list[FileRange] = []
    for each in sorted(ranges):
        if joined and joined[-1].file == each.file and joined[-1].stop >= each.start:
            joined[-1] = joined[-1]._replace(stop=max(joined[-1].stop, each.stop))
        else:
            joined.append(each)
    for file, begin, end in joined:
        for start in range(begin, end, _REQUEST_BYTES):
            yield FileRange(file, start, min(start + _REQUEST_BYTES, end))
