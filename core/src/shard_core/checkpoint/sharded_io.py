"""Checkpoints that every rank writes its part of, in safetensors files at a place all ranks share."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.all_ranks import check_same_path, on_all_ranks
from shard_core.checkpoint.format.folder import latest, read_manifest, standing_manifest
from shard_core.checkpoint.interface import CheckpointIO, LoadedCheckpoint, SaveHandle
from shard_core.checkpoint.load.load import ShardedLoad
from shard_core.checkpoint.retention.policy import Retention, retain
from shard_core.checkpoint.save.async_save import async_save
from shard_core.checkpoint.save.save import ShardedSave
from shard_core.checkpoint.state.filtered import FilteredState
from shard_core.checkpoint.storage.opening import open_folder
from shard_core.errors import CheckpointError, InvalidOption, nearest

if TYPE_CHECKING:
    from pathlib import Path

    from shard_core.checkpoint.state.training_state import TrainingState
    from shard_core.checkpoint.storage.interface import Folder
    from shard_core.coordinator import Coordinator

_FORMS = ("sharded", "full")
#: How often a load begins anew because the checkpoint has been replaced meanwhile.
_MOST_REPLACED = 20


class ShardedCheckpointIO(CheckpointIO):
    """Writes and reads the format that all strategies share.

    With ``state_dict_type="full"`` the ranks' parts are joined into one safetensors file, a tensor at
    a time, before the checkpoint is committed.

    Args:
        retention: Which of the checkpoints in one folder stay when a save into it is committed; None for all.
    """

    def __init__(self, *, retention: Retention | None = None) -> None:
        if not isinstance(retention, Retention | None):
            raise InvalidOption(f"retention is {retention!r}; give a Retention, or None to keep all checkpoints.")
        self._retention = retention

    def __repr__(self) -> str:
        return f"{type(self).__name__}(retention={self._retention!r})"

    def save(
        self,
        path: str | os.PathLike[str],
        state: TrainingState,
        values: Mapping[str, Any],
        *,
        coordinator: Coordinator,
        information: Mapping[str, Any],
        storage_options: Mapping[str, Any] | None = None,
        filter: Callable[[str], bool] | None = None,
        state_dict_type: str | None = None,
        blocking: bool | None = None,
    ) -> SaveHandle:
        """Write a checkpoint, behind training only if ``blocking`` is False; see ``CheckpointIO.save``."""
        behind = blocking is False
        asked = on_all_ranks(coordinator, f"saving {os.fspath(path)!r}", lambda: (_form(state_dict_type), behind))
        _check_same_way(asked)
        form, _ = asked[0]

        def write(state: TrainingState, values: Mapping[str, Any], coordinator: Coordinator) -> SaveHandle:
            save = ShardedSave(path, storage_options, form, coordinator)
            save.begin(state, values, information)
            save.write()
            save.finish()
            return save.commit(self._retain)

        kept = state if filter is None else FilteredState(state, filter)
        if behind:
            return async_save(path, kept, values, coordinator, write)
        return write(kept, values, coordinator)

    def load(
        self,
        path: str | os.PathLike[str],
        state: TrainingState | None,
        *,
        coordinator: Coordinator,
        storage_options: Mapping[str, Any] | None = None,
        strict: bool = True,
        values: Collection[str] = (),
        take_values: Callable[[dict[str, Any]], object] | None = None,
    ) -> LoadedCheckpoint:
        """Fill a state in place; see ``CheckpointIO.load``."""
        doing = f"loading {os.fspath(path)!r}"

        def begin() -> str:
            open_folder(path, storage_options)
            return os.fspath(path)

        check_same_path(on_all_ranks(coordinator, doing, begin))
        folder = open_folder(path, storage_options)
        # Rank 0 alone looks: on shared file systems ranks may see different things.
        manifest = _looked_up(coordinator, doing, lambda: read_manifest(folder))
        for _ in range(_MOST_REPLACED):
            restoration = ShardedLoad(folder, state, strict=strict, values=values, take_values=take_values)
            try:
                _prepare(restoration, manifest, folder, coordinator, doing)
                break
            except CheckpointError:
                before = manifest
                manifest = _looked_up(coordinator, doing, lambda: standing_manifest(folder) or b"")
                if manifest in (b"", before):
                    raise
                # What it named may be gone by now, and what it said does not count any more.
        else:
            raise CheckpointError(
                f"{os.fspath(path)!r} was replaced {_MOST_REPLACED} times while it was read; load it when nobody saves "
                "there so often, or save each checkpoint to a path of its own."
            )
        on_all_ranks(coordinator, doing, restoration.fill)
        return restoration.loaded()

    def _retain(self, committed: Folder) -> None:
        if self._retention is not None:
            retain(committed, self._retention)

    def latest(
        self, folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> Path | str | None:
        """Find the newest committed checkpoint; see ``CheckpointIO.latest``."""
        return latest(folder, storage_options=storage_options)


def _looked_up(coordinator: Coordinator, doing: str, look: Callable[[], bytes]) -> bytes:
    """Look something up on rank 0 for all ranks."""
    found = b""

    def phase() -> None:
        nonlocal found
        if coordinator.rank == 0:
            found = look()

    on_all_ranks(coordinator, doing, phase)
    return coordinator.broadcast_object(found)


def _prepare(restoration: ShardedLoad, manifest: bytes, folder: Folder, coordinator: Coordinator, doing: str) -> None:
    """Do all of a load that changes nothing."""
    # What is on a disk comes sooner from there than from another rank: mostly out of the host's own memory.
    handing_on = folder.far and coordinator.world_size > 1

    def prepare() -> None:
        restoration.prepare(manifest)
        if not handing_on:
            restoration.verify()

    on_all_ranks(coordinator, doing, prepare)
    if handing_on:
        restoration.broadcast_reads(coordinator, doing)
        on_all_ranks(coordinator, doing, restoration.verify)


def _check_same_way(asked: Sequence[tuple[str, bool]]) -> None:
    """Make sure that all ranks save in one form, and all at once or all behind training."""
    for rank, (form, behind) in enumerate(asked):
        if form != asked[0][0]:
            raise CheckpointError(
                f"rank {rank} was given state_dict_type {form!r}, rank 0 {asked[0][0]!r}; give all ranks the same."
            )
        if behind != asked[0][1]:
            raise CheckpointError(
                f"rank {rank} saves with blocking={not behind}, rank 0 with blocking={not asked[0][1]}; give all ranks "
                "the same."
            )


def _form(state_dict_type: str | None) -> str:
    form = "sharded" if state_dict_type is None else state_dict_type
    if not isinstance(form, str):
        raise InvalidOption(
            f"state_dict_type is {form!r}, of type {type(form).__name__}; it must be one of: {', '.join(_FORMS)}."
        )
    if form not in _FORMS:
        raise InvalidOption(
            f"state_dict_type {state_dict_type!r} is none of: {', '.join(_FORMS)}{nearest(form, _FORMS) or '.'}"
        )
    return form
