"""Checkpoints in folders: which there are, which is the newest, and reading the manifest and the index of one."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from shard_core.checkpoint.format.chunk_index import ChunkIndex
from shard_core.checkpoint.format.foreign_formats import holds_weights
from shard_core.checkpoint.format.manifest import HEAD_BYTES, MANIFEST_NAME, Manifest, sequence_in
from shard_core.checkpoint.storage.opening import open_folder
from shard_core.errors import CheckpointCorrupted, CheckpointNotFound, nearest

if TYPE_CHECKING:
    from shard_core.checkpoint.storage.interface import Folder

#: A file can be long and take no room on the disk; reading it takes memory.
_MOST_MANIFEST_BYTES = 1 << 30
_MOST_INDEX_BYTES = 1 << 34
_LISTED = 5
_LOOKED_AT = 100


def latest(folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Path | str | None:
    """Return the newest committed checkpoint among a folder's subfolders.

    The newest is the one committed last, by the number that each save takes, never by a clock: see ``Manifest.order``.
    Saves that were never committed do not count; one whose manifest is damaged is passed over with a
    warning. Among ranks use ``Strategy.latest_checkpoint``: shared file systems disagree between ranks.

    Args:
        folder: Where a run keeps its checkpoints, a path or a URL.
        storage_options: For the store a URL names.

    Returns:
        The checkpoint's path, or its URL where it is in a store, or None if there is none.

    Raises:
        CheckpointNotFound: If it is a file.
    """
    newest: tuple[tuple[int, int, int], str, Folder] | None = None
    opened = open_folder(folder, storage_options)
    if opened.is_file():
        raise CheckpointNotFound(f"{str(opened)!r} is a file; a run keeps its checkpoints in a folder.")
    for each in committed(opened):
        try:
            order = Manifest.from_bytes(read_manifest(each)).order
        except CheckpointCorrupted as error:
            warnings.warn(f"passing over the checkpoint {str(each)!r}: {error}", stacklevel=2)
            continue
        found = order, each.name, each
        newest = found if newest is None else max(newest, found, key=lambda one: one[:2])
    return newest[2].path if newest else None


def committed(folder: Folder) -> list[Folder]:
    """List a folder's subfolders that are committed checkpoints, by name."""
    return [each for each in folder.folders() if is_committed(each)]


def is_committed(folder: Folder) -> bool:
    """Return whether a folder is a committed checkpoint."""
    return folder.holds(MANIFEST_NAME)


def read_manifest(folder: Folder) -> bytes:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointNotFound: If there is none; names those that may have been meant.
        CheckpointCorrupted: If it is too long to be one, or no regular file.
    """
    if not is_committed(folder):
        raise CheckpointNotFound(f"{str(folder)!r} {_absence(folder)}{_hint(folder)}")
    return folder.read(MANIFEST_NAME, _MOST_MANIFEST_BYTES)


def standing_manifest(folder: Folder) -> bytes | None:
    """Read the manifest that makes a folder a checkpoint; None if it is none.

    Raises:
        CheckpointCorrupted: If it is too long to be one, or no regular file.
    """
    try:
        return folder.read(MANIFEST_NAME, _MOST_MANIFEST_BYTES) if is_committed(folder) else None
    except CheckpointCorrupted:
        if is_committed(folder):
            raise
        return None  # removed in between


def next_sequence(saved: Folder) -> int:
    """Return the number of a checkpoint that is about to be committed: one more than the highest beside it has.

    Args:
        saved: Where it will be.
    """
    heads: list[bytes] = []
    try:
        heads = saved.parent.beginnings(MANIFEST_NAME, HEAD_BYTES)
    except OSError as error:
        # Who may not look at what is beside it, cannot ask for the newest of them either.
        if not isinstance(error, PermissionError) and not isinstance(error.__cause__, PermissionError):
            raise
    return 1 + max(map(sequence_in, heads), default=0)


def read_index(folder: Folder, manifest: Manifest) -> ChunkIndex:
    """Read the index of a checkpoint.

    Its places in files are checked for each chunk when that is looked up, or by ``check_places`` for all.

    Raises:
        CheckpointCorrupted: If it is damaged, or does not cover every tensor exactly once.
    """
    if manifest.index.bytes > _MOST_INDEX_BYTES:
        raise CheckpointCorrupted(f"the index of chunks, {manifest.index.path!r}, is longer than any index.")
    with folder.open(manifest.index) as file:
        raw = file.read(0, manifest.index.bytes)
    if xxhash.xxh3_64_hexdigest(raw) != manifest.index.digest:
        raise CheckpointCorrupted(
            f"the index of chunks, {manifest.index.path!r}, is damaged: it does not match its digest."
        )
    index = ChunkIndex.from_bytes(raw, manifest.tensors, manifest.files)
    index.check_tiling()
    return index


def _absence(folder: Folder) -> str:
    if isinstance(folder.path, Path) and holds_weights(folder.path):
        return "holds weights that another library has written; load_weights() loads them"
    if folder.is_file():
        return "is a file; a checkpoint is a folder"
    if not folder.is_folder():
        return "does not exist"
    return f"is no committed checkpoint: it has no {MANIFEST_NAME}"


def _hint(folder: Folder) -> str:
    inside = committed(folder)
    if inside:
        shown = ", ".join(repr(str(each)) for each in inside[-_LISTED:])
        count = f"the last {_LISTED} of {len(inside)}" if len(inside) > _LISTED else "these"
        return f"; it holds {count} checkpoints: {shown}."
    with contextlib.suppress(OSError):  # who may read a folder may not be allowed to list what is beside it
        beside = [each.name for each in folder.parent.folders()[-_LOOKED_AT:] if is_committed(each)]
        return nearest(folder.name, beside) or "."
    return "."
