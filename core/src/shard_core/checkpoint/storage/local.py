"""Folders on a disk: the other implementation is ``remote``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shard_core.checkpoint.storage.interface import Folder, Listed, NewFile, StoredFile, check_read
from shard_core.checkpoint.storage.locking import LOCK_NAME, locked
from shard_core.checkpoint.storage.reads import FileRange, FileReads, OpenedFile
from shard_core.checkpoint.storage.tasks import Tasks
from shard_core.errors import CheckpointCorrupted, CheckpointError

if TYPE_CHECKING:
    from shard_core.checkpoint.storage.interface import FileRecord

#: How much of a new file is buffered before it is sent to the disk.
_FLUSHED_BYTES = 1 << 25


@dataclasses.dataclass(frozen=True)
class LocalFolder(Folder):
    """A folder on a disk.

    Attributes:
        path: Its path.
    """

    is_remote: ClassVar[bool] = False
    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.name

    @property
    def parent(self) -> LocalFolder:
        """The folder it is in."""
        return LocalFolder(self.path.parent)

    def is_folder(self) -> bool:
        """Return whether it exists."""
        return self.path.is_dir()

    def is_file(self) -> bool:
        """Return whether something that is no folder has its name."""
        return self.path.exists() and not self.path.is_dir()

    def is_link(self) -> bool:
        """Return whether it is only another name of a folder elsewhere."""
        return self.path.is_symlink()

    def holds(self, name: str) -> bool:
        """Return whether something of this name is in it, whatever it is."""
        return os.path.lexists(self.path / name)

    def listing(self) -> list[Listed]:
        """List what is in it; nothing if it does not exist, or is no folder."""
        listed = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path) as found:
            for each in found:
                if not each.is_file(follow_symlinks=False):
                    listed.append(Listed(name=each.name, bytes=None))
                    continue
                with contextlib.suppress(FileNotFoundError):  # a save that goes on renames and removes
                    listed.append(Listed(name=each.name, bytes=each.stat(follow_symlinks=False).st_size))
        return listed

    def folders(self) -> list[Folder]:
        """List what may be folders in it, by name; none if it does not exist."""
        return [LocalFolder(path) for path in sorted(self.path.iterdir())] if self.path.is_dir() else []

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return how long files are."""
        return [(self.path / name).stat().st_size for name in names]

    def touched(self, names: Iterable[str]) -> float:
        """Return when the last of some files was written, in seconds since 1970; 0 if none is left."""
        last = 0.0
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                last = max(last, (self.path / name).lstat().st_mtime)
        return last

    def read(self, name: str, most: int | None = None) -> bytes:
        """Read a file."""
        descriptor = open_regular(self.path / name)
        with open(descriptor, "rb") as file:
            # Looked at first: a file can be long and take no room on the disk, but reading it takes memory.
            if most is not None:
                check_read(self, name, os.fstat(descriptor).st_size, most)
            return file.read()

    def beginnings(self, name: str, most: int) -> list[bytes]:
        """Read the beginning of a file of this name in each of its folders; those that have none are passed over."""
        found = []
        for folder in self.folders():
            with (
                contextlib.suppress(CheckpointCorrupted),
                open(open_regular(self.path / folder.name / name), "rb") as file,
            ):
                found.append(file.read(most))
        return found

    def open(self, record: FileRecord) -> StoredFile:
        """Open a file that a manifest names."""
        return _LocalFile(open_recorded(self.path, record))

    def reads(self, records: Sequence[FileRecord]) -> FileReads:
        """Return files that a manifest names, to read from; none is opened before it is needed."""
        return _LocalReads(self.path, records)

    def make(self) -> None:
        """Create it and its parents, each of which must outlast a loss of power."""
        missing = [each for each in (self.path, *self.path.parents) if not each.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for made in reversed(missing):
                fsync_folder(made.parent)
        except OSError as error:
            for made in missing:
                with contextlib.suppress(OSError):
                    made.rmdir()
            if isinstance(error, NotADirectoryError):
                raise CheckpointError(
                    f"{str(self.path)!r} cannot be made, since a part of it is a file; give the path of a folder."
                ) from error
            raise

    def create(self, name: str, size: int) -> NewFile:  # noqa: ARG002 - a disk need not know beforehand
        """Create a new file; one of this name is replaced, never written into."""
        return _NewLocalFile(self.path / name)

    def write(self, name: str, raw: bytes, *, durable: bool) -> None:
        """Write a small file at once; one of this name is replaced."""
        path = self.path / name
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            file.write(raw)
            file.flush()
            if durable:
                os.fsync(file.fileno())

    def claim(self, name: str, raw: bytes) -> bool:
        """Write a small file if nothing of this name is there."""
        try:
            with (self.path / name).open("xb") as file:
                file.write(raw)
        except FileExistsError:
            return False
        return True

    def overwrite(self, name: str, raw: bytes, *, unfinished: str) -> None:
        """Write a file that outlasts a loss of power in place of one of this name, which is there until then."""
        self.write(unfinished, raw, durable=True)
        self._rename(unfinished, name)

    def prepare(
        self, name: str, raw: bytes, *, unfinished: str, may_replace: Callable[[bytes | None], None]
    ) -> Callable[[], None]:
        """Write a file under a name that does not count yet, to be renamed."""
        self.write(unfinished, raw, durable=True)
        self.sync()

        def step() -> None:
            with self.locked():
                may_replace(self.read(name) if self.holds(name) else None)
                self._rename(unfinished, name)

        return step

    def locked(self) -> AbstractContextManager[None]:
        """Lock it against others that commit or remove."""
        return locked(self.path / LOCK_NAME)

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; those that are not there are passed over."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path / name)

    def discard(self, names: Iterable[str]) -> None:
        """Remove files that are no checkpoint's; one that cannot be removed does no harm."""
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(self.path / name)

    def remove_folder(self) -> None:
        """Remove it, once it is empty."""
        self.path.rmdir()

    def sync(self) -> None:
        """Flush its names to the disk."""
        fsync_folder(self.path)

    def _rename(self, unfinished: str, name: str) -> None:
        (self.path / unfinished).rename(self.path / name)
        self.sync()


class _NewLocalFile(NewFile):
    """A file whose first bytes are on their way to the disk while the last are still to be written."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._waiting = 0
        self._flushes = Tasks()

    def write(self, data: memoryview) -> None:
        self._waiting += len(data)
        while data:
            data = data[os.write(self._descriptor, data) :]
        if self._waiting >= _FLUSHED_BYTES and not self._flushes.busy:
            self._waiting = 0
            self._flushes.begin(self._flush)

    def finish(self) -> None:
        self._flush()
        self._flushes.wait()  # a disk reports a failure once, and may have reported it to one of these

    def close(self) -> None:
        with contextlib.suppress(OSError):  # finish() has raised it, or nobody wants the file
            self._flushes.wait()
        os.close(self._descriptor)

    def _flush(self) -> None:
        os.fsync(self._descriptor)


class _LocalFile(StoredFile):
    def __init__(self, descriptor: int) -> None:
        self._file = open(descriptor, "rb")  # noqa: SIM115 - closed by close()

    def read(self, start: int, stop: int) -> bytes:
        self._file.seek(start)
        return self._file.read(stop - start)

    def close(self) -> None:
        self._file.close()


class _LocalReads(FileReads):
    """The files themselves: nothing is fetched."""

    def __init__(self, folder: Path, records: Sequence[FileRecord]) -> None:
        self._folder = folder
        self._records = records
        self._files: dict[int, OpenedFile] = {}

    def fetch(self, ranges: Iterable[FileRange]) -> None:
        pass

    def put(self, fetched: Mapping[FileRange, bytes]) -> None:
        pass

    def file(self, number: int) -> OpenedFile:
        if number not in self._files:
            record = self._records[number]
            self._files[number] = OpenedFile(open_recorded(self._folder, record), record.path)
        return self._files[number]

    def check_unchanged(self) -> None:
        for file in self._files.values():
            file.check_unchanged()

    def release(self) -> None:
        pass


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
    try:
        record.check_length(os.fstat(descriptor).st_size)
    except CheckpointCorrupted:
        os.close(descriptor)
        raise
    return descriptor


def fsync_folder(folder: Path) -> None:
    """Flush a folder's names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
