"""Checkpoints in folders: which there are, which is the newest, and reading the manifest of one."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import xxhash

from shard_core.checkpoint.index import ChunkIndex
from shard_core.checkpoint.manifest import MANIFEST_NAME, Manifest
from shard_core.checkpoint.tensor_file import open_recorded, open_regular
from shard_core.errors import CheckpointCorrupted, CheckpointError, CheckpointNotFound, nearest

#: A file can be long and take no room on the disk; reading it takes memory.
_MOST_MANIFEST_BYTES = 1 << 30
_MOST_INDEX_BYTES = 1 << 34
_LISTED = 5


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Find the newest committed checkpoint among a folder's subfolders.

    Saves that were never committed do not count; one whose manifest is damaged is passed over with a
    warning. Among ranks use ``Strategy.latest_checkpoint``: shared file systems disagree between ranks.

    Args:
        folder: Where a run keeps its checkpoints.

    Returns:
        The checkpoint's path, or None if there is none.
    """
    newest: tuple[int, Path] | None = None
    for path in committed(Path(folder)):
        try:
            created = Manifest.from_bytes(read_manifest(path)).created
        except CheckpointCorrupted as error:
            warnings.warn(f"passing over the checkpoint {str(path)!r}: {error}", stacklevel=2)
            continue
        newest = max(newest or (0, path), (created, path))
    return newest[1] if newest else None


def committed(folder: Path) -> list[Path]:
    """List a folder's subfolders that are committed checkpoints, by name."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if is_committed(path))


def is_committed(path: Path) -> bool:
    """Tell whether a folder is a committed checkpoint."""
    return os.path.lexists(path / MANIFEST_NAME)


def read_manifest(path: Path) -> bytes:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointNotFound: If there is none; names those that may have been meant.
        CheckpointCorrupted: If it is too long to be one, or no regular file.
    """
    if not is_committed(path):
        raise CheckpointNotFound(f"{str(path)!r} {_absence(path)}{_hint(path)}")
    descriptor = open_regular(path / MANIFEST_NAME)
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > _MOST_MANIFEST_BYTES:
            raise CheckpointCorrupted(f"the manifest of {str(path)!r} is longer than any manifest.")
        return file.read(_MOST_MANIFEST_BYTES)


def read_index(folder: Path, manifest: Manifest) -> ChunkIndex:
    """Read and check the index of a checkpoint.

    Raises:
        CheckpointCorrupted: If it is damaged, or does not cover every tensor exactly once.
    """
    if manifest.index.bytes > _MOST_INDEX_BYTES:
        raise CheckpointCorrupted(f"the index of chunks, {manifest.index.path!r}, is longer than any index.")
    descriptor = open_recorded(folder, manifest.index)
    with open(descriptor, "rb") as file:
        raw = file.read(manifest.index.bytes)
    if xxhash.xxh3_64_hexdigest(raw) != manifest.index.digest:
        raise CheckpointCorrupted(
            f"the index of chunks, {manifest.index.path!r}, is damaged: it does not match its digest."
        )
    index = ChunkIndex.from_bytes(raw, manifest.tensors, manifest.files)
    index.check()
    return index


def local_path(path: str | os.PathLike[str]) -> Path:
    """Take a path for one on a local disk.

    Raises:
        CheckpointError: If it is a URL.
    """
    if "://" in os.fspath(path):
        raise CheckpointError(
            f"{os.fspath(path)!r} is a URL, and this version keeps checkpoints in folders only; give a path on a disk "
            "that all ranks share."
        )
    return Path(path)


def _absence(path: Path) -> str:
    from shard_core.checkpoint.peers.recognition import holds_weights

    if not path.exists():
        return "does not exist"
    if holds_weights(path):
        return "holds weights that another library has written; load_weights() loads them"
    if not path.is_dir():
        return "is a file; a checkpoint is a folder"
    return f"is no committed checkpoint: it has no {MANIFEST_NAME}"


def _hint(path: Path) -> str:
    inside = committed(path)
    if inside:
        shown = ", ".join(repr(str(each)) for each in inside[-_LISTED:])
        count = f"the last {_LISTED} of {len(inside)}" if len(inside) > _LISTED else "these"
        return f"; it holds {count} checkpoints: {shown}."
    return (nearest(path.name, [each.name for each in committed(path.parent)])) or "."
