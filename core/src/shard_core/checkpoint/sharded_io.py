"""The checkpoint IO of every strategy: each rank writes its shards into safetensors files in a shared folder.

The phases of a save are in ``save``, those of a load in ``load``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.all_ranks import check_same_path, on_all_ranks
from shard_core.checkpoint.format.folder import latest, read_manifest, standing_manifest
from shard_core.checkpoint.interface import BegunSave, CheckpointIO, LoadedCheckpoint, SaveHandle
from shard_core.checkpoint.load.load import ShardedLoad
from shard_core.checkpoint.retention.policy import Retention, retain
from shard_core.checkpoint.save.async_save import save_in_background
from shard_core.checkpoint.save.request import SaveRequest
from shard_core.checkpoint.save.save import ShardedSave
from shard_core.checkpoint.state.filtered import FilteredState
from shard_core.checkpoint.storage.opening import open_folder
from shard_core.errors import CheckpointError, InvalidOption

if TYPE_CHECKING:
    from pathlib import Path

    from shard_core.checkpoint.state.training_state import TrainingState
    from shard_core.checkpoint.storage.interface import Folder
    from shard_core.coordinator import Coordinator

#: How often a load begins anew because the checkpoint has been replaced meanwhile.
_MOST_REPLACED = 20


class ShardedCheckpointIO(CheckpointIO):
    """Writes and reads the format that all strategies share.

    With ``state_dict_type="full"`` the ranks' shards are joined into one safetensors file, a tensor at
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

    @property
    def has_joint_outcome(self) -> bool:
        """True, but for a class that saves or loads otherwise."""
        return (type(self).save, type(self).load) == (ShardedCheckpointIO.save, ShardedCheckpointIO.load)

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
        """Write a checkpoint, asynchronously only if ``blocking`` is False; see ``CheckpointIO.save``."""
        request = SaveRequest(path=path, state_dict_type=state_dict_type, is_async=blocking is False)

        def write(
            state: TrainingState,
            values: Mapping[str, Any],
            coordinator: Coordinator,
            stage: Callable[[], None] = lambda: None,
        ) -> SaveHandle:
            save = ShardedSave(request, storage_options, coordinator)
            save.begin_on_all_ranks(stage)
            save.write(state, values, information)
            return save.commit(self._retain)

        kept = _kept(state, filter)
        if request.is_async:
            return save_in_background(request, kept, values, coordinator, write)
        return write(kept, values, coordinator)

    def begin_save(
        self,
        path: str | os.PathLike[str],
        *,
        coordinator: Coordinator,
        storage_options: Mapping[str, Any] | None = None,
        state_dict_type: str | None = None,
        blocking: bool | None = None,
    ) -> BegunSave | None:
        """Begin a save that blocks; see ``CheckpointIO.begin_save``."""
        if blocking is False or not self.has_joint_outcome:
            return None
        request = SaveRequest(path=path, state_dict_type=state_dict_type)
        return _BegunSave(ShardedSave(request, storage_options, coordinator), self._retain)

    def load(
        self,
        path: str | os.PathLike[str],
        state: TrainingState | None,
        *,
        coordinator: Coordinator,
        storage_options: Mapping[str, Any] | None = None,
        strict: bool = True,
        cast: bool = False,
        values: Collection[str] = (),
        take_values: Callable[[dict[str, Any]], object] | None = None,
    ) -> LoadedCheckpoint:
        """Fill a state in place; see ``CheckpointIO.load``."""
        doing = f"loading {os.fspath(path)!r}"

        manifest = b""

        def begin() -> str:
            nonlocal manifest
            folder = open_folder(path, storage_options)
            if coordinator.rank == 0:  # alone: on shared file systems ranks may see different things
                manifest = read_manifest(folder)
            return os.fspath(path)

        check_same_path(on_all_ranks(coordinator, doing, begin))
        folder = open_folder(path, storage_options)
        manifest = coordinator.broadcast_object(manifest)
        for _ in range(_MOST_REPLACED):
            load = ShardedLoad(folder, state, strict=strict, cast=cast, values=values, take_values=take_values)
            try:
                _prepare(load, manifest, folder, coordinator, doing)
                break
            except CheckpointError:
                before = manifest
                manifest = _read_on_rank_0(coordinator, doing, lambda: standing_manifest(folder) or b"")
                if manifest in (b"", before):
                    raise
                # What it named may be gone by now, and its content does not count any more.
        else:
            raise CheckpointError(
                f"{os.fspath(path)!r} was replaced {_MOST_REPLACED} times while it was read; load it when nobody saves "
                "there so often, or save each checkpoint to a path of its own."
            )
        on_all_ranks(coordinator, doing, load.fill)
        return load.loaded()

    def _retain(self, committed: Folder) -> None:
        if self._retention is not None:
            retain(committed, self._retention)

    def latest(
        self, folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> Path | str | None:
        """Return the newest committed checkpoint; see ``CheckpointIO.latest``."""
        return latest(folder, storage_options=storage_options)


class _BegunSave(BegunSave):
    def __init__(self, save: ShardedSave, committed: Callable[[Folder], object]) -> None:
        self._save = save
        self._committed = committed
        self.announcement = save.begin()

    def save(
        self,
        announcements: Sequence[Any],
        state: TrainingState,
        values: Mapping[str, Any],
        *,
        information: Mapping[str, Any],
        filter: Callable[[str], bool] | None = None,
    ) -> SaveHandle:
        """Write the checkpoint."""
        self._save.agree(announcements)
        self._save.write(_kept(state, filter), values, information)
        return self._save.commit(self._committed)

    def abandon(self) -> None:
        """Undo what was begun."""
        self._save.abandon()


def _kept(state: TrainingState, filter: Callable[[str], bool] | None) -> TrainingState:
    return state if filter is None else FilteredState(state, filter)


def _read_on_rank_0(coordinator: Coordinator, doing: str, read: Callable[[], bytes]) -> bytes:
    """Read on rank 0 and broadcast."""
    found = b""

    def phase() -> None:
        nonlocal found
        if coordinator.rank == 0:
            found = read()

    on_all_ranks(coordinator, doing, phase)
    return coordinator.broadcast_object(found)


def _prepare(load: ShardedLoad, manifest: bytes, folder: Folder, coordinator: Coordinator, doing: str) -> None:
    """Do all of a load that changes nothing."""
    # What is on a disk comes sooner from there than from another rank: mostly out of the host's own memory.
    broadcasts = folder.is_remote and coordinator.world_size > 1

    def prepare() -> None:
        load.prepare(manifest)
        if not broadcasts:
            load.verify()

    on_all_ranks(coordinator, doing, prepare)
    if broadcasts:
        load.broadcast_reads(coordinator, doing)
        on_all_ranks(coordinator, doing, load.verify)
