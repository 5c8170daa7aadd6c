"""Where foreign weights are: on a disk, or in a store whose bytes pass through a folder on one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shard_core.checkpoint.storage.opening import open_folder
from shard_core.checkpoint.storage.remote import RemoteFolder
from shard_core.errors import CheckpointError, ShardError

if TYPE_CHECKING:
    from shard_core.checkpoint.storage.interface import Listed

#: What one request asks for at most: several at once are faster than a long one.
_REQUEST_BYTES = 1 << 23


class Source:
    """Files on a disk, which are read where they are.

    Attributes:
        root: The file or the folder that the user has named, as this rank opens it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def listing(self) -> Sequence[Listed]:
        """List what ``mirror`` needs to know; called on rank 0 alone."""
        return ()

    def mirror(self, listing: Sequence[Listed]) -> None:
        """Create ``root`` on this rank, once before anything is opened."""

    def fetch(self, file: Path, start: int = 0, stop: int | None = None) -> None:
        """Fetch bytes to where the file is opened, all of them without a range; elsewhere it may read as zeros.

        Raises:
            CheckpointError: If that cannot be done.
        """

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Replace names in errors by what the user has named."""
        yield

    def close(self) -> None:
        """Remove what ``mirror`` has created."""


class Store(Source):
    """Objects of a store, each mirrored by a file as long, with holes where nothing was fetched.

    Args:
        folder: What the user has named; it may be one object.
        beside: Whether it is one that cannot be read without those beside it.
    """

    def __init__(self, folder: RemoteFolder, *, beside: bool) -> None:
        is_object = beside or folder.is_file()
        self._folder = folder.parent if is_object else folder
        self._object = folder.name if is_object else ""
        self._alone = is_object and not beside
        self._fetched: set[tuple[Path, int, int]] = set()
        self._home: tempfile.TemporaryDirectory[str] | None = None

    def listing(self) -> Sequence[Listed]:
        """List the objects."""
        objects = [each for each in self._folder.listing() if each.bytes is not None]
        return [each for each in objects if each.name == self._object or not self._alone]

    def mirror(self, listing: Sequence[Listed]) -> None:
        """Create files of holes."""
        self._home = tempfile.TemporaryDirectory(prefix="shard-weights-")
        home = Path(self._home.name, self._folder.name)
        if listing:  # else there is nothing of this name, and nothing there says so
            home.mkdir()
        for each in listing:
            with (home / each.name).open("wb") as file:
                file.truncate(each.bytes)
        self.root = home / self._object

    def fetch(self, file: Path, start: int = 0, stop: int | None = None) -> None:
        """Fetch a range, once."""
        if not file.is_file():
            return  # opening it raises
        length = file.stat().st_size
        stop = length if stop is None else min(stop, length)
        if start >= stop or (file, start, stop) in self._fetched:
            return
        pieces = [(begin, min(begin + _REQUEST_BYTES, stop)) for begin in range(start, stop, _REQUEST_BYTES)]
        fetched = self._folder.fetch((file.name, begin, end) for begin, end in pieces)
        try:
            with file.open("r+b") as copy:
                for (begin, _), data in zip(pieces, fetched, strict=True):
                    copy.seek(begin)
                    copy.write(data)
        except OSError as error:
            if isinstance(error, ShardError):
                raise
            raise CheckpointError(
                f"what is read from a store passes through {tempfile.gettempdir()!r}, which refuses: "
                f"{error.strerror}; set TMPDIR to a folder with room for what one rank reads."
            ) from error
        self._fetched.add((file, start, stop))

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Replace names of files in errors by URLs."""
        try:
            yield
        except ShardError as error:
            if self._home is not None:
                mirrored = str(Path(self._home.name, self._folder.name))
                error.args = (str(error).replace(mirrored, str(self._folder)), *error.args[1:])
            raise

    def close(self) -> None:
        """Remove the files."""
        if self._home is not None:
            self._home.cleanup()


def open_source(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, *, index: str) -> Source:
    """Return where foreign weights are; nothing is read yet.

    Args:
        path: A path on a disk, or a URL that fsspec knows.
        storage_options: For the store a URL names.
        index: How the name of a file ends that names others beside it.

    Raises:
        InvalidOption: If the path or the options cannot be used; says what to give instead.
        CheckpointError: If a package for this kind of URL is missing; says which.
    """
    folder = open_folder(path, storage_options)
    if isinstance(folder, RemoteFolder):
        return Store(folder, beside=folder.name.endswith(index))
    return Source(Path(folder.path))
