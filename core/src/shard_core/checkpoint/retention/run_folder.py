"""What is in the folder of a run: committed checkpoints, damaged ones, and what saves that died have left."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.format.folder import read_manifest
from shard_core.checkpoint.format.manifest import FILE_NAME, MANIFEST_NAME, Manifest
from shard_core.checkpoint.storage.locking import LOCK_NAME
from shard_core.checkpoint.storage.opening import open_folder
from shard_core.errors import CheckpointCorrupted, CheckpointError, CheckpointNotFound

if TYPE_CHECKING:
    from pathlib import Path

    from shard_core.checkpoint.storage.interface import Folder

_MANIFEST = re.compile(rf"{re.escape(MANIFEST_NAME)}(?:-[0-9a-f]{{12}})?")
_OF_RANK = re.compile(r"[a-z]+-(\d+)-of-(\d+)[-.].*")
#: No other library uses such names; ``checkpoint.safetensors`` and some of ``model-*`` may be others' weights.
_DISTINCTIVE = re.compile(r"(?:optim|state|part|index)[-.].*|[a-z]+-00000-of-.*|.*-[0-9a-f]{12}(?:\.safetensors)?")


class Standing(enum.Enum):
    """What a folder is; the value is the word people read."""

    COMMITTED = "committed"
    DAMAGED = "damaged"
    UNCOMMITTED = "not committed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunEntry:
    """One subfolder of a run's folder that a save made.

    Attributes:
        folder: The subfolder.
        standing: Whether it is a checkpoint.
        attempt: The save that wrote it, if it is committed.
        created: When it was committed, in nanoseconds since 1970, if it is.
        order: Its place among the checkpoints of the run, if it is one: see ``Manifest.order``.
        step: The value that was saved as ``step``, if there was one.
        files: The files that belong to it, with their lengths.
        leftovers: Files of ours in it that no checkpoint names.
        unknown: Names of what else is in it.
        touched: When a file in it was last written, in seconds since 1970; of a checkpoint with nothing left over,
            when it was committed.
    """

    folder: Folder
    standing: Standing
    attempt: str | None
    created: int | None
    order: tuple[int, int, int] | None
    step: int | None
    files: Mapping[str, int]
    leftovers: Mapping[str, int]
    unknown: tuple[str, ...]
    touched: float

    @property
    def path(self) -> Path | str:
        """What names the subfolder: a path, or a URL."""
        return self.folder.path

    @property
    def bytes(self) -> int:
        """How much room its files take."""
        return sum(self.files.values())


def run_entries(folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> list[RunEntry]:
    """List what saves have made in the folder of a run, the oldest first.

    Args:
        folder: Where a run keeps its checkpoints, a path or a URL; other things in it are passed over.
        storage_options: For the store a URL names.

    Raises:
        CheckpointNotFound: If there is no such folder.
    """
    return entries_of(open_folder(folder, storage_options))


def entries_of(folder: Folder) -> list[RunEntry]:
    """List what saves have made in a folder that was opened; see ``run_entries``."""
    if not folder.is_folder():
        problem = "is a file" if folder.is_file() else "does not exist"
        raise CheckpointNotFound(f"{str(folder)!r} {problem}; give the folder that a run keeps its checkpoints in.")
    found = [run_entry(each) for each in folder.folders()]
    return sorted((entry for entry in found if entry), key=_place)


def run_entry(folder: Folder) -> RunEntry | None:
    """Describe one subfolder of a run's folder; None if no save wrote it as far as can be seen, or it is gone.

    A link is no save, wherever it leads.
    """
    if folder.is_link() or not folder.is_folder():
        return None
    ours: dict[str, int] = {}
    unknown: list[str] = []
    for each in folder.listing():
        if each.name == LOCK_NAME:
            continue  # comes and goes with whoever puts a checkpoint in place or removes one
        if each.bytes is None or not is_ours(each.name):
            unknown.append(each.name)
        else:
            ours[each.name] = each.bytes
    manifest, standing = _manifest(folder, ours)
    if manifest is None and not any(map(is_distinctive, ours)):
        return None
    kept = {MANIFEST_NAME, *manifest.names} if manifest else set(ours)
    leftovers = {name: size for name, size in ours.items() if name not in kept}
    return RunEntry(
        folder=folder,
        standing=standing,
        attempt=manifest.attempt if manifest else None,
        created=manifest.created if manifest else None,
        order=manifest.order if manifest else None,
        step=manifest.step if manifest else None,
        files={name: size for name, size in ours.items() if name in kept},
        leftovers=leftovers,
        unknown=tuple(sorted(unknown)),
        touched=_touched(folder, ours, leftovers, manifest),
    )


def is_ours(name: str) -> bool:
    """Return whether a file of this name may be a save's; ranks are counted from 0, others count files from 1.

    Example:
        >>> is_ours("model-00000-of-00002.safetensors"), is_ours("model-00002-of-00002.safetensors")
        (True, False)
    """
    numbered = _OF_RANK.fullmatch(name)
    if numbered and int(numbered[1]) >= int(numbered[2]):
        return False
    return bool(FILE_NAME.fullmatch(name) or _MANIFEST.fullmatch(name))


def is_distinctive(name: str) -> bool:
    """Return whether a file of this name shows by itself that a save was here.

    Example:
        >>> is_distinctive("optim-00001-of-00002.safetensors"), is_distinctive("model-00001-of-00002.safetensors")
        (True, False)
    """
    return is_ours(name) and bool(_DISTINCTIVE.fullmatch(name))


def _manifest(folder: Folder, names: Mapping[str, int]) -> tuple[Manifest | None, Standing]:
    if MANIFEST_NAME not in names:
        return None, Standing.UNCOMMITTED
    try:
        return Manifest.from_bytes(read_manifest(folder)), Standing.COMMITTED
    except CheckpointCorrupted:
        return None, Standing.DAMAGED
    except CheckpointNotFound as error:
        raise CheckpointError(f"{str(folder)!r} was changed while it was looked at; try again.") from error


def _touched(folder: Folder, ours: Mapping[str, int], leftovers: Mapping[str, int], manifest: Manifest | None) -> float:
    if manifest is None:
        return folder.touched(ours)
    # The manifest is written after all that it names: there may be very many files, and a request for each.
    return folder.touched([MANIFEST_NAME, *leftovers]) if leftovers else manifest.created / 1e9


def _place(entry: RunEntry) -> tuple[bool, tuple[float, ...], str]:
    """Return the sort key of an entry: checkpoints by their order, after them the others by when they were written."""
    return entry.order is None, (entry.touched,) if entry.order is None else entry.order, entry.folder.name
