"""A checkpoint IO that saves asynchronously unless the user asks otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.interface import BegunSave, CheckpointIO, LoadedCheckpoint, SaveHandle
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.storage.opening import absolute
from shard_core.errors import InvalidOption

if TYPE_CHECKING:
    from shard_core.checkpoint.state.training_state import TrainingState
    from shard_core.coordinator import Coordinator


class AsyncCheckpointIO(CheckpointIO):
    """Saves through another checkpoint IO, with ``blocking=False`` where nothing else was asked for.

    Args:
        inner: What saves and loads; None for ``ShardedCheckpointIO``. One that cannot save asynchronously refuses to.

    Example:
        >>> AsyncCheckpointIO()
        AsyncCheckpointIO(ShardedCheckpointIO(retention=None))
    """

    def __init__(self, inner: CheckpointIO | None = None) -> None:
        if not isinstance(inner, CheckpointIO | None):
            raise InvalidOption(f"inner is {inner!r}; give a CheckpointIO, or None for the default.")
        self._inner = inner or ShardedCheckpointIO()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    @property
    def has_joint_outcome(self) -> bool:
        """As of what it saves through, but for a class that saves or loads otherwise."""
        own = (type(self).save, type(self).load) == (AsyncCheckpointIO.save, AsyncCheckpointIO.load)
        return own and self._inner.has_joint_outcome

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
        """Write a checkpoint; see ``CheckpointIO.save``."""
        return self._inner.save(
            path if blocking or self._inner.has_joint_outcome else absolute(path),
            state,
            values,
            coordinator=coordinator,
            information=information,
            storage_options=storage_options,
            filter=filter,
            state_dict_type=state_dict_type,
            blocking=bool(blocking),
        )

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
        if not blocking or not self.has_joint_outcome:
            return None
        return self._inner.begin_save(
            path,
            coordinator=coordinator,
            storage_options=storage_options,
            state_dict_type=state_dict_type,
            blocking=True,
        )

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
        return self._inner.load(
            path,
            state,
            coordinator=coordinator,
            storage_options=storage_options,
            strict=strict,
            values=values,
            take_values=take_values,
            **({"cast": True} if cast else {}),
        )

    def latest(
        self, folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> Path | str | None:
        """Return the newest committed checkpoint; see ``CheckpointIO.latest``."""
        return self._inner.latest(folder, storage_options=storage_options)
