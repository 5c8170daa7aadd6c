"""The interface of storage: folders of files with plain names, on a disk (``local``) or in a store (``remote``)."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from shard_core.errors import CheckpointCorrupted

if TYPE_CHECKING:
    from shard_core.checkpoint.storage.reads import FileReads


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

    def check_length(self, length: int) -> None:
        """Check that it is as long as it was.

        Raises:
            CheckpointCorrupted: If it is not.
        """
        if length != self.bytes:
            raise CheckpointCorrupted(
                f"{self.path!r} has {length} bytes, but {self.bytes} were committed; it was cut short or replaced."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listed:
    """One thing in a folder.

    Attributes:
        name: Its name.
        bytes: Its length; None if it is no file.
    """

    name: str
    bytes: int | None


class NewFile(abc.ABC):
    """A file that is being written, in one stream; closing it unfinished discards it as far as possible."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abc.abstractmethod
    def write(self, data: memoryview) -> None:
        """Append all of some bytes."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Write it so that it outlasts a loss of power."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close it, finished or not."""

    def complete(self) -> None:
        """Finish and close it; a task for a background thread."""
        with self:
            self.finish()


class StoredFile(abc.ABC):
    """A committed file, opened for reading."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> bytes:
        """Read a range of it; less where it ends before."""

    def ranges(self, ranges: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Read several ranges, each when it is asked for or a little before."""
        for start, stop in ranges:
            yield self.read(start, stop)

    def close(self) -> None:  # noqa: B027 - there may be nothing to close
        """Close it."""


class Folder(abc.ABC):
    """A folder on a disk or in a store; ``str`` of it is what its user calls it.

    What the storage refuses raises ``OSError``, or ``CheckpointCorrupted`` where a file is asked for that is not there
    as it must be.

    Attributes:
        is_remote: Whether reading costs so much that one rank should read and broadcast.
        path: What names it: a path, or a URL.
    """

    is_remote: ClassVar[bool]
    path: Path | str

    def __str__(self) -> str:
        return str(self.path)

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The last part of its path."""

    @property
    @abc.abstractmethod
    def parent(self) -> Folder:
        """The folder it is in."""

    # What is there.

    @abc.abstractmethod
    def is_folder(self) -> bool:
        """Return whether it exists."""

    @abc.abstractmethod
    def is_file(self) -> bool:
        """Return whether something that is no folder has its name."""

    @abc.abstractmethod
    def is_link(self) -> bool:
        """Return whether it is only another name of a folder elsewhere."""

    @abc.abstractmethod
    def holds(self, name: str) -> bool:
        """Return whether something of this name is in it, whatever it is."""

    @abc.abstractmethod
    def listing(self) -> list[Listed]:
        """List what is in it; nothing if it does not exist, or is no folder."""

    @abc.abstractmethod
    def folders(self) -> list[Folder]:
        """List what may be folders in it, by name; none if it does not exist."""

    @abc.abstractmethod
    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return how long files are."""

    @abc.abstractmethod
    def touched(self, names: Iterable[str]) -> float:
        """Return when the last of some files was written, in seconds since 1970; 0 if none is left."""

    # Reading.

    @abc.abstractmethod
    def read(self, name: str, most: int | None = None) -> bytes:
        """Read a file.

        Args:
            name: The file.
            most: How many bytes it may have; None for any number.

        Raises:
            CheckpointCorrupted: If there is no such file, or it is longer.
        """

    def read_each(self, names: Iterable[str]) -> Iterator[bytes]:
        """Read several files, each when it is asked for or a little before; raises what ``read`` raises."""
        for name in names:
            yield self.read(name)

    @abc.abstractmethod
    def beginnings(self, name: str, most: int) -> list[bytes]:
        """Read the beginning of a file of this name in each of its folders; those that have none are passed over.

        Args:
            name: The file.
            most: How many bytes of each are read.
        """

    @abc.abstractmethod
    def open(self, record: FileRecord) -> StoredFile:
        """Open a file that a manifest names.

        Raises:
            CheckpointCorrupted: If there is no such file, or it is not as long as it was when it was committed.
        """

    @abc.abstractmethod
    def reads(self, records: Sequence[FileRecord]) -> FileReads:
        """Return files that a manifest names, to read from; none is opened before it is needed."""

    # Writing.

    @abc.abstractmethod
    def make(self) -> None:
        """Create it and the folders it is in, where they do not exist."""

    @abc.abstractmethod
    def create(self, name: str, size: int) -> NewFile:
        """Create a new file; one of this name is replaced, never written into.

        Args:
            name: Its name.
            size: How long it will be.
        """

    @abc.abstractmethod
    def write(self, name: str, raw: bytes, *, durable: bool) -> None:
        """Write a small file at once; one of this name is replaced.

        Args:
            name: Its name.
            raw: Its content.
            durable: Whether to wait until it outlasts a loss of power.
        """

    @abc.abstractmethod
    def claim(self, name: str, raw: bytes) -> bool:
        """Write a small file if nothing of this name is there.

        Args:
            name: Its name.
            raw: Its content.

        Returns:
            Whether it was written: by one of several that try at once. A store that cannot decide writes nothing.
        """

    @abc.abstractmethod
    def overwrite(self, name: str, raw: bytes, *, unfinished: str) -> None:
        """Write a file that outlasts a loss of power in place of one of this name, which is there until then.

        Args:
            name: Its name.
            raw: Its content.
            unfinished: What it may be called meanwhile.
        """

    @abc.abstractmethod
    def prepare(
        self, name: str, raw: bytes, *, unfinished: str, may_replace: Callable[[bytes | None], None]
    ) -> Callable[[], None]:
        """Prepare a file that will appear in one step, in place of one of this name.

        Args:
            name: Its name.
            raw: Its content.
            unfinished: What it may be called meanwhile.
            may_replace: Called in the step with what stands there, None for nothing; raises what shall be raised if
                that must stay. On a disk with locks nobody else takes such a step in between, and in a store that
                takes requests with conditions none is carried out.

        Returns:
            The step. If it fails with ``OSError``, it may have been done nevertheless; with any other
            error it was not.
        """

    @abc.abstractmethod
    def locked(self) -> AbstractContextManager[None]:
        """Lock it against others that commit or remove; stores have no locks, and keep out nobody."""

    @abc.abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove files; those that are not there are passed over.

        Raises:
            OSError: If one cannot be removed; others may be left then.
        """

    @abc.abstractmethod
    def discard(self, names: Iterable[str]) -> None:
        """Remove files that are no checkpoint's; one that cannot be removed does no harm."""

    @abc.abstractmethod
    def remove_folder(self) -> None:
        """Remove it, once it is empty.

        Raises:
            OSError: If it is not.
        """

    @abc.abstractmethod
    def sync(self) -> None:
        """Flush its names, so that what was added and what was removed outlasts a loss of power."""


def check_read(folder: Folder, name: str, length: int, most: int) -> None:
    """Refuse a file that is too long to be what it is taken for.

    Args:
        folder: Where it is.
        name: Its name.
        length: How many bytes it has.
        most: How many it may have.

    Raises:
        CheckpointCorrupted: If it has more.
    """
    if length > most:
        raise CheckpointCorrupted(f"{name!r} in {str(folder)!r} is longer than it can be; it has {length} bytes.")
