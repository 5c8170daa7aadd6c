"""The commit protocol: a save becomes a checkpoint in one step, or leaves what was there as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import xxhash

from shard_core.checkpoint.folder import is_committed
from shard_core.checkpoint.manifest import FILE_NAME, MANIFEST_NAME
from shard_core.checkpoint.tensor_file import FileRecord
from shard_core.errors import CheckpointError

#: What tensors belong to, as their keys and their files begin.
KINDS = ("model", "optim", "state")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try to save, known to all ranks; its files touch no other attempt's.

    Attributes:
        identity: New for every try: a part that an earlier try left behind is never taken for this one's.
        folder: The checkpoint.
        world_size: How many ranks write.
        replaces: Whether a committed checkpoint stands there, whose files must not be touched.
    """

    identity: str
    folder: Path
    world_size: int
    replaces: bool

    @classmethod
    def begin(cls, folder: Path, world_size: int) -> Attempt:
        """Make the folder; called by rank 0 alone.

        Raises:
            CheckpointError: If the path is taken by something else than a folder.
        """
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{str(folder)!r} is a file; give the path of a folder to keep the checkpoint in.")
        _make_folders(folder)
        return cls(identity=secrets.token_hex(6), folder=folder, world_size=world_size, replaces=is_committed(folder))

    def tensor_file(self, kind: str, rank: int) -> Path:
        """Name the file for one kind of tensors of one rank.

        Names are plain, as people expect them, unless a committed checkpoint may be using those.
        """
        suffix = f"-{self.identity}" if self.replaces else ""
        return self.folder / f"{kind}-{rank:05d}-of-{self.world_size:05d}{suffix}.safetensors"

    def single_file(self, kind: Literal["index", "checkpoint"]) -> Path:
        """Name a file that rank 0 writes for all."""
        return self.folder / f"{kind}{f'-{self.identity}' if self.replaces else ''}.safetensors"

    def part_file(self, rank: int) -> Path:
        """Name the file in which a rank tells what it wrote."""
        return self.folder / f"part-{rank:05d}-of-{self.world_size:05d}-{self.identity}.safetensors"

    def write_index(self, raw: bytes) -> FileRecord:
        """Write the index of chunks."""
        path = self.single_file("index")
        write_file(path, raw, durable=True)
        return FileRecord(path=path.name, bytes=len(raw), digest=xxhash.xxh3_64_hexdigest(raw))

    def write_manifest(self, raw: bytes) -> None:
        """Write the manifest under a name that does not count yet."""
        write_file(self._new_manifest, raw, durable=True)
        fsync_folder(self.folder)

    def publish(self, kept: set[str]) -> None:
        """Make the folder the new checkpoint, in one step, then remove what no longer belongs to it.

        Args:
            kept: The files the new manifest names.

        Raises:
            OSError: If the disk refuses; what was there is there, or the new checkpoint is.
        """
        try:
            self._new_manifest.rename(self.folder / MANIFEST_NAME)
        except OSError:
            # Only if it surely was not renamed: some file systems do what they say has failed.
            if os.path.lexists(self._new_manifest):
                self.discard(range(self.world_size))
            raise
        fsync_folder(self.folder)
        _remove(path for path in self.folder.iterdir() if path.name not in kept and _is_ours(path.name))

    def discard(self, ranks: Iterable[int]) -> None:
        """Remove what ranks wrote in a try that failed before it was published, as far as possible."""
        for rank in ranks:
            _remove([self.part_file(rank), *(self.tensor_file(kind, rank) for kind in KINDS)])
            if rank == 0:
                _remove([self._new_manifest, self.single_file("index"), self.single_file("checkpoint")])
        if not self.replaces:
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # only an empty one goes

    @property
    def _new_manifest(self) -> Path:
        return self.folder / f"{MANIFEST_NAME}-{self.identity}"


def _remove(paths: Iterable[Path]) -> None:
    """Remove files that are no checkpoint's; one that cannot be removed does no harm."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def write_file(path: Path, raw: bytes, *, durable: bool) -> None:
    """Create a file, replacing none.

    Args:
        path: Where; a file there is unlinked first.
        raw: Its content.
        durable: Whether to wait until it is on the disk.
    """
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(raw)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folders(folder: Path) -> None:
    """Make a folder and its parents, each of which must outlast a loss of power."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for made in reversed(missing):
            fsync_folder(made.parent)
    except OSError:
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()
        raise


def _is_ours(name: str) -> bool:
    return bool(FILE_NAME.fullmatch(name)) or name.startswith(f"{MANIFEST_NAME}-")
