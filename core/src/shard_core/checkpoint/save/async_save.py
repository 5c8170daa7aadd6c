"""Async saves: a snapshot of the state, and a background thread that writes it while training goes on."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.all_ranks import on_all_ranks
from shard_core.checkpoint.interface import SaveHandle
from shard_core.checkpoint.save.host_memory import Room, crowded_host, room_for
from shard_core.checkpoint.save.request import SaveRequest, check_same_request
from shard_core.checkpoint.save.staging import Snapshot
from shard_core.checkpoint.storage.opening import path_or_url

if TYPE_CHECKING:
    from shard_core.checkpoint.save.request import RequestSummary
    from shard_core.checkpoint.state.training_state import TrainingState
    from shard_core.coordinator import Coordinator


def async_save(
    path: str | os.PathLike[str],
    state: TrainingState,
    values: Mapping[str, Any],
    coordinator: Coordinator,
    write: Callable[[TrainingState, Mapping[str, Any], Coordinator], object],
) -> SaveHandle:
    """Copy the state and write it in a background thread; every rank calls this.

    This is how a ``CheckpointIO`` saves with ``blocking=False``. The process does not exit before it is done. Where a
    host has no room for its ranks' snapshots, the save is written from the live tensors before this returns.

    Args:
        path: Where the checkpoint will be.
        state: Modules and optimizers.
        values: The rest, by the user's names.
        coordinator: How ranks talk.
        write: Saves a state and values, and returns when the checkpoint is complete; it communicates through the
            coordinator it is given and through no other.

    Returns:
        A handle to wait on.

    Raises:
        CheckpointError: If there is something that no checkpoint can hold.
        MissingCapability: If the ranks have no side channel.
    """

    def stage_and_write(
        state: TrainingState, values: Mapping[str, Any], coordinator: Coordinator, stage: Callable[[], None]
    ) -> None:
        on_all_ranks(coordinator, f"saving {os.fspath(path)!r}", stage)
        write(state, values, coordinator)

    return save_in_background(SaveRequest(path=path, is_async=True), state, values, coordinator, stage_and_write)


def save_in_background(
    request: SaveRequest,
    state: TrainingState,
    values: Mapping[str, Any],
    coordinator: Coordinator,
    write: Callable[[TrainingState, Mapping[str, Any], Coordinator, Callable[[], None]], object],
) -> SaveHandle:
    """Do what ``async_save`` does, but let ``write`` stage the snapshot, in a phase that it has in any case.

    Args:
        request: What this rank was asked for.
        state: Modules and optimizers.
        values: The rest, by the user's names.
        coordinator: How ranks talk.
        write: As for ``async_save``; its last argument stages the snapshot, and may raise on one rank alone.
    """
    doing = f"saving {os.fspath(request.path)!r}"
    handle = SaveHandle(path=path_or_url(request.path), staged=Future(), committed=Future())
    taken: list[Snapshot] = []

    def describe() -> tuple[RequestSummary, tuple[str, int, int | None]]:
        summary = request.summary()
        taken.append(Snapshot(state, values, rank=coordinator.rank))
        room = room_for(taken[0].bytes)
        return summary, (room.host, room.wanted, room.available)

    answers = on_all_ranks(coordinator, doing, describe)
    check_same_request([summary for summary, *_ in answers])  # of a rank that blocks it is not the room that follows
    crowded = crowded_host([Room(*room) for _, room in answers])
    if crowded is not None:
        if coordinator.rank == 0:
            warnings.warn(
                f"host {crowded.host!r} has no room for the {crowded.wanted / 1e9:.1f} GB that its ranks would copy; "
                "async saves write straight from the tensors instead, and training waits for them.",
                stacklevel=4,
            )
        write(taken[0], taken[0].values, coordinator, lambda: None)
        return SaveHandle.finished(request.path)
    on_all_ranks(coordinator, doing, taken[0].take)

    def save(side_channel: Coordinator) -> None:
        snapshot = taken.pop()

        def stage() -> None:
            try:
                snapshot.stage()
            finally:
                handle.staged.set_result(None)

        try:
            write(snapshot, snapshot.values, side_channel, stage)
        finally:
            if not handle.staged.done():
                handle.staged.set_result(None)

    run_in_background(coordinator, save, handle.committed, name="shard-save")
    return handle


def run_in_background(
    coordinator: Coordinator, task: Callable[[Coordinator], None], outcome: Future[None], *, name: str
) -> None:
    """Start a task in a background thread, with a side channel to the other ranks; every rank calls this.

    The interpreter waits for the thread before it exits.

    Args:
        coordinator: How ranks talk in this thread.
        task: Called with how they talk in the background thread.
        outcome: Done when the task has returned; raises what it raised.
        name: The thread's.

    Raises:
        MissingCapability: If the ranks have no side channel.
    """
    stack = contextlib.ExitStack()
    # Entered here: a process that is about to exit may start no further threads, and a side channel may need one.
    side_channel = stack.enter_context(coordinator.side_channel())

    def run() -> None:
        try:
            with stack:
                task(side_channel)
        except BaseException as error:  # noqa: BLE001 - whoever looks at the outcome raises it
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    try:
        threading.Thread(target=run, name=name, daemon=False).start()
    except RuntimeError:
        stack.close()
        raise
