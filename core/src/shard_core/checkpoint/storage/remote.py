"""Folders of an object store, through fsspec: prefixes that the names of objects begin with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from shard_core.checkpoint.storage.interface import Folder, Listed, NewFile, StoredFile, check_read
from shard_core.checkpoint.storage.requests import (
    ObjectRange,
    beginnings,
    ranges,
    storage_errors,
    whole_objects,
    write_condition,
)
from shard_core.checkpoint.storage.upload import Upload
from shard_core.errors import CheckpointCorrupted, CheckpointError, StorageError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from shard_core.checkpoint.storage.interface import FileRecord
    from shard_core.checkpoint.storage.reads import FileReads


@dataclasses.dataclass(frozen=True)
class RemoteFolder(Folder):
    """A folder of an object store.

    An object appears as a whole, when it was sent as a whole, and so does the manifest. What a client caches of a
    listing is invalidated before each look: other ranks write into the same folder.

    Attributes:
        path: Its URL.
        filesystem: The store.
        key: What the store calls it.
    """

    is_remote: ClassVar[bool] = True
    path: str
    filesystem: AbstractFileSystem
    key: str

    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> RemoteFolder:
        """The folder it is in; of a whole store itself."""
        key, slash, _ = self.key.rpartition("/")
        if not slash:
            return self
        return RemoteFolder(self.path.rpartition("/")[0], self.filesystem, key)

    def is_folder(self) -> bool:
        """Return whether there is an object in it."""
        info = self._info(self.key)
        return info is not None and info["type"] == "directory"

    def is_file(self) -> bool:
        """Return whether an object has its name."""
        info = self._info(self.key)
        return info is not None and info["type"] != "directory"

    def is_link(self) -> bool:
        """Return whether it is only another name of a folder elsewhere: stores have no links."""
        return False

    def holds(self, name: str) -> bool:
        """Return whether an object of this name is in it."""
        return self._info(self._key(name)) is not None

    def listing(self) -> list[Listed]:
        """List what is in it; nothing if there is nothing."""
        return [
            Listed(name=name, bytes=info["size"] if info["type"] == "file" else None)
            for name, info in self._entries().items()
        ]

    def folders(self) -> list[Folder]:
        """List the folders in it, by name."""
        names = sorted(name for name, info in self._entries().items() if info["type"] == "directory")
        return [RemoteFolder(f"{self.path}/{name}", self.filesystem, self._key(name)) for name in names]

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return how long objects are."""
        self._invalidate()
        with storage_errors(self.path):
            return list(self.filesystem.sizes([self._key(name) for name in names]))

    def touched(self, names: Iterable[str]) -> float:
        """Return when the last of some objects was written, in seconds since 1970; 0 if none is left."""
        last = 0.0
        with storage_errors(self.path):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    last = max(last, self.filesystem.modified(self._key(name)).timestamp())
        return last

    def read(self, name: str, most: int | None = None) -> bytes:
        """Read an object."""
        key = self._key(name)
        info = self._info(key)
        if info is None or info["type"] != "file":
            raise CheckpointCorrupted(f"{f'{self.path}/{name}'!r} cannot be opened: there is no such object.")
        if most is not None:
            check_read(self, name, info["size"], most)
        return next(whole_objects(self.filesystem, self.path, [key]))

    def read_each(self, names: Iterable[str]) -> Iterator[bytes]:
        """Read several objects, some at once."""
        self._invalidate()
        return whole_objects(self.filesystem, self.path, [self._key(name) for name in names])

    def beginnings(self, name: str, most: int) -> list[bytes]:
        """Read the beginning of an object of this name in each of its folders; those that have none are passed over."""
        keys = [self._key(f"{folder.name}/{name}") for folder in self.folders()]
        return list(beginnings(self.filesystem, self.path, keys, most))

    def open(self, record: FileRecord) -> StoredFile:
        """Open an object that a manifest names."""
        self.check([record])
        return _RemoteFile(self, record.path)

    def reads(self, records: Sequence[FileRecord]) -> FileReads:
        """Return objects that a manifest names, to read from; bytes go through anonymous local files."""
        from shard_core.checkpoint.storage.cache import CachedReads

        return CachedReads(self, records)

    def check(self, records: Sequence[FileRecord]) -> None:
        """Check that objects are as long as they were when they were committed.

        Raises:
            CheckpointCorrupted: Naming one that is not.
        """
        try:
            sizes = self.sizes([record.path for record in records])
        except FileNotFoundError as error:
            raise CheckpointCorrupted(f"an object of {self.path!r} is not there any more: {error}.") from error
        for record, size in zip(records, sizes, strict=True):
            record.check_length(size)

    def fetch(self, wanted: Iterable[tuple[str, int, int]]) -> Iterator[bytes]:
        """Read ranges of objects, several at once, in their order.

        Args:
            wanted: Names, first bytes, and the ones after the last.
        """
        asked = (ObjectRange(self._key(name), start, stop) for name, start, stop in wanted)
        return ranges(self.filesystem, self.path, asked)

    def make(self) -> None:
        """Do nothing: a folder is there as soon as an object is."""

    def create(self, name: str, size: int) -> NewFile:
        """Create a new object; it appears when it is finished."""
        return Upload(self.filesystem, self._key(name), f"{self.path}/{name}", size)

    def write(self, name: str, raw: bytes, *, durable: bool) -> None:  # noqa: ARG002 - stores keep what they accept
        """Write an object at once."""
        with storage_errors(self.path):
            self.filesystem.pipe_file(self._key(name), raw)

    def claim(self, name: str, raw: bytes) -> bool:  # noqa: ARG002 - few stores can decide who was first
        """Write nothing: not every store can decide which of several was first."""
        return False

    def overwrite(self, name: str, raw: bytes, *, unfinished: str) -> None:  # noqa: ARG002 - one request
        """Write an object in place of one of this name, which is there until then."""
        self.write(name, raw, durable=True)

    def prepare(
        self,
        name: str,
        raw: bytes,
        *,
        unfinished: str,  # noqa: ARG002 - one request
        may_replace: Callable[[bytes | None], None],
    ) -> Callable[[], None]:
        """Prepare an object in memory, to be sent in one request."""
        return functools.partial(self._publish, name, raw, may_replace)

    def locked(self) -> AbstractContextManager[None]:
        """Do nothing: stores have no locks."""
        return contextlib.nullcontext()

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there are passed over."""
        there = self._entries()
        keys = [self._key(name) for name in names if name in there]
        if keys:
            with storage_errors(self.path), contextlib.suppress(FileNotFoundError):
                self.filesystem.rm(keys)

    def discard(self, names: Iterable[str]) -> None:
        """Remove objects that are no checkpoint's; one that cannot be removed does no harm."""
        with contextlib.suppress(OSError):
            self.remove(list(names))

    def remove_folder(self) -> None:
        """Do nothing: a folder is gone with its last object."""

    def sync(self) -> None:
        """Do nothing: stores keep what they accept."""

    def _publish(self, name: str, raw: bytes, may_replace: Callable[[bytes | None], None]) -> None:
        """Send an object, on the condition that what may be replaced still stands, where the store takes conditions.

        In any case look at what stands afterwards: the answer may have been lost and not the request, and without
        conditions another request may have come in between.
        """
        key = self._key(name)
        try:
            info = self._info(key)
            standing = None if info is None else self.read(name)
        except StorageError as error:
            raise CheckpointError(str(error)) from error  # nothing was sent
        may_replace(standing)
        condition = write_condition(self.filesystem, info)
        try:
            with storage_errors(self.path):
                self.filesystem.pipe_file(key, raw, **condition)
        except (StorageError, FileNotFoundError):
            standing = self._standing(name)
            if standing == raw:
                return
            if condition:
                # Not sent without: a request that is carried out later yet would replace what stands.
                may_replace(standing)
            raise
        if not condition:
            standing = self._standing(name)
            if standing != raw:
                may_replace(standing)

    def _standing(self, name: str) -> bytes | None:
        with contextlib.suppress(OSError, CheckpointCorrupted):
            return self.read(name)
        return None

    def _key(self, name: str) -> str:
        return f"{self.key}/{name}"

    def _invalidate(self) -> None:
        self.filesystem.invalidate_cache(self.key)

    def _info(self, key: str) -> Mapping[str, Any] | None:
        # Never `exists()`, which takes a store that cannot be reached for one where nothing is.
        self.filesystem.invalidate_cache(key)
        with storage_errors(self.path), contextlib.suppress(FileNotFoundError):
            info: Mapping[str, Any] = self.filesystem.info(key)
            return info
        return None

    def _entries(self) -> dict[str, Mapping[str, Any]]:
        """List what is directly in it; an object with the folder's own name, which some tools make, is none of it."""
        self._invalidate()
        found: list[Mapping[str, Any]] = []
        with storage_errors(self.path), contextlib.suppress(FileNotFoundError):
            found = self.filesystem.ls(self.key, detail=True)
        entries = {}
        for info in found:
            folder, _, name = info["name"].rstrip("/").rpartition("/")
            if folder == self.key and name not in ("", ".", ".."):
                entries[name] = info
        return entries


class _RemoteFile(StoredFile):
    def __init__(self, folder: RemoteFolder, name: str) -> None:
        self._folder = folder
        self._name = name

    def read(self, start: int, stop: int) -> bytes:
        return next(self.ranges([(start, stop)]))

    def ranges(self, ranges: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        return self._folder.fetch((self._name, start, stop) for start, stop in ranges)
