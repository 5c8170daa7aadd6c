"""One save of all ranks into one checkpoint, phase by phase."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.all_ranks import check_same_path, on_all_ranks
from shard_core.checkpoint.format.folder import next_sequence
from shard_core.checkpoint.format.manifest import Manifest
from shard_core.checkpoint.format.values import encode, encode_scalar
from shard_core.checkpoint.interface import SaveHandle
from shard_core.checkpoint.save.commit import Attempt
from shard_core.checkpoint.save.rank_files import (
    check_lengths,
    gather_rank_indexes,
    value_shards,
    write_full,
    write_rank,
)
from shard_core.checkpoint.state.training_state import KeySpace
from shard_core.checkpoint.storage.opening import open_folder
from shard_core.checkpoint.storage.tasks import Tasks
from shard_core.errors import CheckpointError, ShardError

if TYPE_CHECKING:
    from shard_core.checkpoint.format.chunk_index import ChunkIndex
    from shard_core.checkpoint.state.shard import TensorShard
    from shard_core.checkpoint.state.training_state import TrainingState
    from shard_core.checkpoint.storage.interface import Folder
    from shard_core.coordinator import Coordinator


class ShardedSave:
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
        self._digests: list[str] = []
        self._finishing = Tasks()

    def begin(self, state: TrainingState, values: Mapping[str, Any], information: Mapping[str, Any]) -> None:
        """Describe what is to be written, create the folder on rank 0, and check that the other ranks see it."""
        coordinator = self._coordinator

        def describe() -> str:
            self._describe(state, values, information)
            open_folder(self._path, self._storage_options)
            return os.fspath(self._path)

        def make_folder() -> tuple[str, bool]:
            if coordinator.rank != 0:
                return "", False
            self._attempt = Attempt.begin(folder, coordinator.world_size)
            return self._attempt.identity, self._attempt.plain

        def check_shared() -> None:
            if coordinator.rank != 0:
                self._attempt.check_shared()

        check_same_path(on_all_ranks(coordinator, self._doing, describe))
        folder = open_folder(self._path, self._storage_options)
        identity, plain = on_all_ranks(coordinator, self._doing, make_folder)[0]
        if coordinator.rank != 0:
            self._attempt = Attempt(identity=identity, folder=folder, world_size=coordinator.world_size, plain=plain)
        try:
            on_all_ranks(coordinator, self._doing, check_shared)
        except BaseException:
            if coordinator.rank == 0:
                self._attempt.discard([0])
                self._attempt.release()
            raise

    def write(self) -> None:
        """Write this rank's files; ``finish`` waits until the disk has them."""
        rank = self._coordinator.rank

        def write() -> str:
            return write_rank(self._attempt, rank, self._shards, self._finishing)

        try:
            self._digests = on_all_ranks(self._coordinator, self._doing, write)
        except CheckpointError:
            self._abort()
            raise

    def finish(self) -> None:
        """Wait until this rank's files outlast a loss of power; rank 0 describes meanwhile what all have written."""
        rank = self._coordinator.rank

        def finish() -> None:
            if rank == 0:
                self._index = gather_rank_indexes(self._attempt, self._digests)
                if self._form == "sharded":
                    self._write_manifest(self._index)
            self._finishing.wait()

        try:
            on_all_ranks(self._coordinator, self._doing, finish)
        except CheckpointError:
            self._abort()
            raise

    def commit(self, committed: Callable[[Folder], object] | None) -> SaveHandle:
        """Publish what all ranks have written as a checkpoint, on rank 0.

        Args:
            committed: What rank 0 does with the checkpoint's folder afterwards, before any rank goes on.
        """

        def publish() -> None:
            if self._coordinator.rank == 0:
                self._publish()
                if committed is not None:
                    # Before the others go on: they may next meet where nobody waits long for rank 0.
                    committed(self._attempt.folder)

        on_all_ranks(self._coordinator, self._doing, publish)
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
        """Publish the checkpoint, once all it consists of outlasts a loss of power."""
        attempt = self._attempt
        try:
            check_lengths(attempt, self._index)
            if self._form == "full":
                self._write_manifest(write_full(attempt, self._index))
                self._finishing.wait()
        except BaseException:
            self._discard(range(attempt.world_size))
            attempt.release()
            raise
        attempt.publish(self._step, self._kept)

    def _write_manifest(self, index: ChunkIndex) -> None:
        """Write the manifest where it does not count yet."""
        manifest = Manifest(
            attempt=self._attempt.identity,
            created=time.time_ns(),
            sequence=next_sequence(self._attempt.folder),
            form=self._form,
            world_size=self._attempt.world_size,
            index=self._attempt.write_index(index.to_bytes(), self._finishing),
            files=index.files,
            tensors=index.tensors,
            **self._about,
        )
        self._kept = {file.path for file in (*manifest.files, manifest.index)}
        self._step = self._attempt.write_manifest(manifest.to_bytes())

    def _abort(self) -> None:
        """Remove what was written; every rank calls this, and nobody writes any more."""
        rank = self._coordinator.rank
        self._discard([rank])
        with contextlib.suppress(ShardError):  # a rank that does not come may still be writing: what is left stays
            self._coordinator.barrier(f"{self._doing}: giving up")
            if rank == 0:
                self._attempt.release()

    def _discard(self, ranks: Iterable[int]) -> None:
        with contextlib.suppress(Exception):  # the caller raises what made it abort
            self._finishing.wait()
        self._attempt.discard(ranks)
