"""Checkpoints that every rank writes its part of, in safetensors files at a place all ranks share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.agreement import check_same_path, together
from shard_core.checkpoint.behind_training import save_behind_training
from shard_core.checkpoint.commit import Attempt
from shard_core.checkpoint.filtered_state import FilteredState
from shard_core.checkpoint.folder import latest, read_manifest
from shard_core.checkpoint.interface import CheckpointIO, LoadedCheckpoint, SaveHandle
from shard_core.checkpoint.manifest import Manifest
from shard_core.checkpoint.restoration import Restoration
from shard_core.checkpoint.retention import Retention, retain
from shard_core.checkpoint.saving import gather_parts, value_shards, write_full, write_rank
from shard_core.checkpoint.state import KeySpace
from shard_core.checkpoint.storage.opening import open_folder
from shard_core.checkpoint.values import encode, encode_scalar
from shard_core.errors import CheckpointError, InvalidOption, nearest

if TYPE_CHECKING:
    from pathlib import Path

    from shard_core.checkpoint.shard import TensorShard
    from shard_core.checkpoint.state import TrainingState
    from shard_core.coordinator import Coordinator

_FORMS = ("sharded", "full")


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
        asked = together(coordinator, f"saving {os.fspath(path)!r}", lambda: (_form(state_dict_type), behind))
        _check_same_way(asked)
        form, _ = asked[0]

        def write(state: TrainingState, values: Mapping[str, Any], coordinator: Coordinator) -> SaveHandle:
            save = _Save(path, storage_options, form, coordinator)
            save.begin(state, values, information)
            save.write()
            return save.commit(self._retention)

        kept = state if filter is None else FilteredState(state, filter)
        if behind:
            return save_behind_training(path, kept, values, coordinator, write)
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
    ) -> LoadedCheckpoint:
        """Fill a state in place; see ``CheckpointIO.load``."""
        doing = f"loading {os.fspath(path)!r}"

        def look() -> tuple[str, bytes]:
            # Rank 0 alone looks: on shared file systems ranks may see different things.
            folder = open_folder(path, storage_options)
            return os.fspath(path), read_manifest(folder) if coordinator.rank == 0 else b""

        answers = together(coordinator, doing, look)
        check_same_path([given for given, _ in answers])
        restoration = Restoration(open_folder(path, storage_options), state, strict=strict, values=values)
        together(coordinator, doing, lambda: restoration.prepare(answers[0][1]))
        together(coordinator, doing, restoration.fill)
        return restoration.loaded()

    def latest(
        self, folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> Path | str | None:
        """Find the newest committed checkpoint; see ``CheckpointIO.latest``."""
        return latest(folder, storage_options=storage_options)


class _Save:
    """One save, in the order of its methods; every rank calls each."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None,
        form: str,
        coordinator: Coordinator,
    ) -> None:
        self._doing = f"saving {os.fspath(path)!r}"
        self._path = path
        self._storage_options = storage_options
        self._form = form
        self._coordinator = coordinator
        self._shards: list[TensorShard] = []
        self._about: dict[str, Any] = {}
        self._parts: list[str] = []

    def begin(self, state: TrainingState, values: Mapping[str, Any], information: Mapping[str, Any]) -> None:
        """Find out what is to be written; then rank 0 makes the folder, and the others see that it is theirs too."""
        coordinator = self._coordinator

        def describe() -> str:
            self._describe(state, values, information)
            open_folder(self._path, self._storage_options)
            return os.fspath(self._path)

        def make_folder() -> tuple[str, bool]:
            if coordinator.rank != 0:
                return "", False
            attempt = Attempt.begin(folder, coordinator.world_size)
            return attempt.identity, attempt.replaces

        def check_shared() -> None:
            if coordinator.rank != 0:
                self._attempt.check_shared()

        check_same_path(together(coordinator, self._doing, describe))
        folder = open_folder(self._path, self._storage_options)
        identity, replaces = together(coordinator, self._doing, make_folder)[0]
        self._attempt = Attempt(identity=identity, folder=folder, world_size=coordinator.world_size, replaces=replaces)
        try:
            together(coordinator, self._doing, check_shared)
        except BaseException:
            if coordinator.rank == 0:
                self._attempt.discard([0])
            raise

    def write(self) -> None:
        """Write this rank's files."""
        rank = self._coordinator.rank
        try:
            self._parts = together(
                self._coordinator, self._doing, lambda: write_rank(self._attempt, rank, self._shards)
            )
        except CheckpointError:
            self._attempt.discard([rank])
            raise

    def commit(self, retention: Retention | None) -> SaveHandle:
        """Let rank 0 make a checkpoint of what all have written, then remove what it makes superfluous."""

        def publish() -> None:
            if self._coordinator.rank == 0:
                self._publish()
                if retention is not None:
                    # Before the others go on: they may next meet where nobody waits long for rank 0.
                    retain(self._attempt.folder, retention)

        together(self._coordinator, self._doing, publish)
        return SaveHandle.finished(self._attempt.folder.path)

    def _describe(self, state: TrainingState, values: Mapping[str, Any], information: Mapping[str, Any]) -> None:
        encoded, tensors = value_shards(values, write=self._coordinator.rank == 0)
        self._shards = state.shards() + tensors
        self._about = {
            "modules": dict(KeySpace(state.modules).prefixes),
            "aliases": state.aliases(),
            "optimizers": {key: record.to_json(key) for key, record in state.optimizers().items()},
            "values": encoded,
            "information": encode(dict(information), "information", encode_scalar),
        }

    def _publish(self) -> None:
        attempt = self._attempt
        try:
            index = gather_parts(attempt, self._parts)
            if self._form == "full":
                index = write_full(attempt, index)
            manifest = Manifest(
                attempt=attempt.identity,
                created=time.time_ns(),
                form=self._form,
                world_size=attempt.world_size,
                index=attempt.write_index(index.to_bytes()),
                files=index.files,
                tensors=index.tensors,
                **self._about,
            )
            step = attempt.write_manifest(manifest.to_bytes())
        except BaseException:
            attempt.discard(range(attempt.world_size))
            raise
        attempt.publish(step, {file.path for file in (*manifest.files, manifest.index)})


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
