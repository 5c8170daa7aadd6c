"""Removing checkpoints, so that what is left of one is never taken for a whole one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_core.checkpoint.format.manifest import CLAIM, MANIFEST_NAME
from shard_core.checkpoint.retention.run_folder import is_distinctive, run_entry
from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    from shard_core.checkpoint.retention.run_folder import RunEntry


def remove_entry(entry: RunEntry, *, leftovers: bool = True) -> None:
    """Remove all that a save made, the manifest before all else, and the folder.

    Args:
        entry: What stood there when somebody decided to remove it.
        leftovers: Whether files go that its manifest does not name; another save may be writing them.

    Raises:
        CheckpointError: If something else stands there now, or a file that no save wrote, or the disk refuses.
    """
    if entry.unknown:
        raise CheckpointError(f"{str(entry.folder)!r} also holds {entry.unknown[0]!r}, which no save made; it stays.")
    names = {*entry.files, *(entry.leftovers if leftovers else ())} - {MANIFEST_NAME}
    try:
        with entry.folder.locked():  # else a save could put another manifest in place of the one that was looked at
            _check_unchanged(entry)
            if MANIFEST_NAME in entry.files:
                entry.folder.remove([MANIFEST_NAME])
                # Else a loss of power could bring the manifest back, without the files it names.
                entry.folder.sync()
        # What shows that a save was here goes last, so that what a kill leaves is known for leftovers; and at the very
        # end what lets another save take the plain names.
        distinctive = {name for name in names if is_distinctive(name)}
        for some in (names - distinctive, distinctive - {CLAIM}, names & {CLAIM}):
            entry.folder.remove(sorted(some))
        if leftovers or not entry.leftovers:
            entry.folder.remove_folder()
    except OSError as error:
        raise CheckpointError(f"{str(entry.folder)!r} cannot be removed: {error.strerror or error}.") from error


def remove_leftovers(entry: RunEntry) -> None:
    """Remove what saves that died have left inside a checkpoint, which itself stays as it is.

    Args:
        entry: What stood there when somebody decided to clean it.

    Raises:
        CheckpointError: If something else stands there now, or the disk refuses.
    """
    try:
        with entry.folder.locked():
            _check_unchanged(entry)
            entry.folder.remove(sorted(entry.leftovers, key=lambda name: name == CLAIM))
    except OSError as error:
        raise CheckpointError(f"{str(entry.folder)!r} cannot be cleaned: {error.strerror or error}.") from error


def _check_unchanged(entry: RunEntry) -> None:
    if run_entry(entry.folder) != entry:
        raise CheckpointError(f"{str(entry.folder)!r} has changed since it was looked at; it stays as it is.")
