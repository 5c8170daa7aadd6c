"""An async save fails on every rank at the same step, and is reported once."""

import os
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_core.checkpoint.interface import SaveHandle
from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.collectives.single import SingleCollectives
from shard_core.errors import CheckpointError
from shard_core.strategy.async_saves import AsyncSaves


def begun(staged: bool = True) -> SaveHandle:
    handle = SaveHandle(path=Path("run/step-1"), staged=Future(), committed=Future())
    if staged:
        handle.staged.set_result(None)
    return handle


def fails_after(steps: list[int], failing: int) -> tuple[int, str]:
    """Fail one rank's save when each rank has begun another number of steps; return the step that raises."""
    collectives = ProcessGroupCollectives(guard_timeout=timedelta(seconds=30))
    rank = int(os.environ["RANK"])
    collectives.connect(rank, len(steps), torch.device("cpu"))
    saves, handle = AsyncSaves(), begun()
    saves.watch(handle, collectives, is_joint=False)
    for _ in range(steps[rank]):
        saves.begin_step()
    collectives.barrier()
    if rank == failing:
        handle.committed.set_exception(OSError("no room"))
    else:
        handle.committed.set_result(None)
    if rank == 1:
        time.sleep(0.3)  # it learns of it while others are long past that step, or would be
    for step in range(steps[rank] + 1, 100):
        try:
            saves.begin_step()
        except CheckpointError as error:
            saves.begin_step()
            saves.settle()
            return step, str(error)
        time.sleep(0.01)
    return 100, ""


@pytest.mark.parametrize(("steps", "failing"), [([5, 2], 1), ([0, 3], 1), ([1, 1], 0)])
def test_a_failure_is_raised_at_the_same_step_on_every_rank(worlds: Any, steps: list[int], failing: int) -> None:
    (first, said), (second, also) = worlds(2).run(fails_after, steps, failing)
    assert first == second > max(steps)
    assert said == also == f"saving 'run/step-1' failed on 1 of 2 ranks: rank {failing}: OSError: no room"


def watched(*, staged: bool = True) -> tuple[AsyncSaves, SaveHandle, SaveHandle]:
    saves, handle = AsyncSaves(), begun(staged)
    return saves, handle, saves.watch(handle, SingleCollectives(), is_joint=False)


def test_a_failure_retrieved_by_the_handle_is_not_raised_again() -> None:
    for ask in (lambda handle: handle.wait(), lambda handle: handle.committed.result()):
        saves, handle, given = watched()
        handle.committed.set_exception(OSError("no room"))
        with pytest.raises(CheckpointError, match="no room"):
            ask(given)
        saves.begin_step()
        saves.settle()
    saves, handle, given = watched()
    handle.committed.set_exception(OSError("no room"))
    assert "no room" in str(given.committed.exception())
    saves.settle()


def test_a_wait_that_timed_out_has_retrieved_nothing() -> None:
    saves, handle, given = watched()
    with pytest.raises(TimeoutError):
        given.wait(timeout=0.01)
    handle.committed.set_exception(OSError("no room"))
    with pytest.raises(CheckpointError, match="no room"):
        saves.settle()
    saves.settle()


def test_a_step_waits_for_the_copies_and_for_nothing_else() -> None:
    saves, handle, given = watched(staged=False)
    waiting = time.monotonic()

    def stage() -> None:
        time.sleep(0.2)
        handle.staged.set_result(None)

    threading.Thread(target=stage).start()
    saves.begin_step()
    assert time.monotonic() - waiting >= 0.2
    saves.begin_step()
    assert not given.committed.done()
    handle.committed.set_result(None)
    assert given.wait() == Path("run/step-1")
    saves.begin_step()


def test_a_save_that_is_complete_is_returned_as_it_is() -> None:
    done = SaveHandle.finished("run/step-1")
    assert AsyncSaves().watch(done, SingleCollectives(), is_joint=False) is done
    failed = begun()
    failed.committed.set_exception(OSError("no room"))
    saves = AsyncSaves()
    saves.watch(failed, SingleCollectives(), is_joint=False)
    with pytest.raises(CheckpointError, match="no room"):
        saves.settle()
