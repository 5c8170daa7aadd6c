"""One save of all ranks into one checkpoint, phase by phase."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.all_ranks import on_all_ranks
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
from shard_core.checkpoint.save.request import RequestSummary, check_same_request
from shard_core.checkpoint.state.training_state import KeySpace
from shard_core.checkpoint.storage.opening import open_folder
from shard_core.checkpoint.storage.tasks import Tasks
from shard_core.errors import CheckpointError, CollectiveError, ShardError

if TYPE_CHECKING:
    from shard_core.checkpoint.format.chunk_index import ChunkIndex
    from shard_core.checkpoint.save.request import SaveRequest
    from shard_core.checkpoint.state.shard import TensorShard
    from shard_core.checkpoint.state.training_state import TrainingState
    from shard_core.checkpoint.storage.interface import Folder
    from shard_core.coordinator import Coordinator

#: What the ranks tell one another of a save that each has begun: its request, and of rank 0's attempt the identity and
#: whether its files may have plain names.
Announcement = tuple[RequestSummary, str, bool]


class ShardedSave:
    """One save; every rank calls ``begin_on_all_ranks``, ``write`` and ``commit``, and in each the ranks meet once.

    They must meet three times: no rank may write before it knows the attempt, no checkpoint may appear before all ranks
    have written, and no rank may go on before it knows what became of it. Whose ranks meet anyhow before they save
    calls ``begin`` on each, lets them exchange what it returned, and then ``agree``, not ``begin_on_all_ranks``.

    Args:
        request: What this rank was asked for.
        storage_options: For the store a URL names.
        coordinator: How ranks talk.
    """

    def __init__(
        self, request: SaveRequest, storage_options: Mapping[str, Any] | None, coordinator: Coordinator
    ) -> None:
        self._doing = f"saving {os.fspath(request.path)!r}"
        self._request = request
        self._storage_options = storage_options
        self._coordinator = coordinator
        self._attempt: Attempt | None = None
        self._shards: list[TensorShard] = []
        self._about: dict[str, Any] = {}
        self._digests: list[str] = []
        self._finishing = Tasks()
        self._writes = False

    def begin_on_all_ranks(self, first: Callable[[], object] = lambda: None) -> None:
        """Create the folder on rank 0, and check that all ranks save the same checkpoint there.

        Args:
            first: What each rank does before.
        """

        def begin() -> Announcement:
            first()
            return self.begin()

        try:
            announcements = on_all_ranks(self._coordinator, self._doing, begin)
        except CollectiveError:
            raise  # others may have heard all, and write
        except BaseException:
            self.abandon()
            raise
        self.agree(announcements)

    def begin(self) -> Announcement:
        """Create the folder, on rank 0; return what the other ranks must know."""
        summary = self._request.summary()
        folder = open_folder(self._request.path, self._storage_options, start=self._request.start)
        if self._coordinator.rank != 0:
            return summary, "", False
        self._attempt = Attempt.begin(folder, self._coordinator.world_size)
        return summary, self._attempt.identity, self._attempt.plain

    def agree(self, announcements: Sequence[Announcement]) -> None:
        """Check that all ranks save the same checkpoint, and join rank 0's attempt.

        Args:
            announcements: What ``begin`` returned on each rank, in rank order.

        Raises:
            CheckpointError: On every rank, if they were asked for different things; nothing is left.
        """
        try:
            check_same_request([summary for summary, *_ in announcements])
        except CheckpointError:
            self.abandon()
            raise
        _, identity, plain = announcements[0]
        if self._attempt is None:
            folder = open_folder(self._request.path, self._storage_options, start=self._request.start)
            self._attempt = Attempt(
                identity=identity, folder=folder, world_size=self._coordinator.world_size, plain=plain
            )

    def abandon(self) -> None:
        """Undo ``begin``, before any rank has agreed."""
        if self._attempt is not None:
            self._attempt.discard([0])
            self._attempt.release()
            self._attempt = None

    def write(self, state: TrainingState, values: Mapping[str, Any], information: Mapping[str, Any]) -> None:
        """Write this rank's files so that they outlast a loss of power."""
        rank, attempt = self._coordinator.rank, self._joined

        def write() -> str:
            self._describe(state, values, information)
            if rank != 0:
                attempt.check_shared()
            self._writes = True
            digest = write_rank(attempt, rank, self._shards, self._finishing)
            self._finishing.wait()
            return digest

        try:
            self._digests = on_all_ranks(self._coordinator, self._doing, write)
        except CollectiveError:
            raise
        except BaseException:
            self._abort()
            raise

    def commit(self, committed: Callable[[Folder], object] | None) -> SaveHandle:
        """Publish what all ranks have written as a checkpoint, on rank 0.

        Args:
            committed: What rank 0 does with the checkpoint's folder afterwards, before any rank goes on.
        """
        folder = self._joined.folder

        def publish() -> None:
            if self._coordinator.rank == 0:
                self._publish()
                if committed is not None:
                    # Before the others go on: they may next meet where nobody waits long for rank 0.
                    committed(folder)

        on_all_ranks(self._coordinator, self._doing, publish)
        return SaveHandle.finished(folder.path)

    @property
    def _joined(self) -> Attempt:
        assert self._attempt is not None, "begin_on_all_ranks() or agree() comes first"
        return self._attempt

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
        """Publish the checkpoint: what all ranks wrote outlasts a loss of power by now."""
        attempt = self._joined
        try:
            index = gather_rank_indexes(attempt, self._digests)
            check_lengths(attempt, index)
            step, kept = self._write_manifest(write_full(attempt, index) if self._request.form == "full" else index)
            self._finishing.wait()
        except BaseException:
            self._discard(range(attempt.world_size))
            attempt.release()
            raise
        attempt.publish(step, kept)

    def _write_manifest(self, index: ChunkIndex) -> tuple[Callable[[], None], set[str]]:
        """Write the manifest where it does not count yet; return the step that publishes it, and the files it names."""
        manifest = Manifest(
            attempt=self._joined.identity,
            created=time.time_ns(),
            sequence=next_sequence(self._joined.folder),
            form=self._request.form,
            world_size=self._joined.world_size,
            index=self._joined.write_index(index.to_bytes(), self._finishing),
            files=index.files,
            tensors=index.tensors,
            **self._about,
        )
        kept = {file.path for file in (*manifest.files, manifest.index)}
        return self._joined.write_manifest(manifest.to_bytes()), kept

    def _abort(self) -> None:
        """Remove what was written; every rank calls this, and nobody writes any more."""
        rank = self._coordinator.rank
        if rank == 0 or self._writes:  # else this may be a folder of this host alone, its files another save's
            self._discard([rank])
        with contextlib.suppress(ShardError):  # a rank that does not come may still be writing: what is left stays
            self._coordinator.barrier(f"{self._doing}: giving up")
            if rank == 0:
                self._joined.release()

    def _discard(self, ranks: Iterable[int]) -> None:
        with contextlib.suppress(Exception):  # the caller raises what made it abort
            self._finishing.wait()
        self._joined.discard(ranks)
