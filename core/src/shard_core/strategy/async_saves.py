"""The async save that may be under way, and how its failure is reported to the user."""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import sys
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from shard_core.checkpoint.all_ranks import on_all_ranks
from shard_core.checkpoint.interface import SaveHandle
from shard_core.checkpoint.save.async_save import run_in_background
from shard_core.errors import CollectiveError

if TYPE_CHECKING:
    from shard_core.coordinator import Coordinator


class AsyncSaves:
    """Holds the one async save that may be under way until it is complete or its failure was reported."""

    def __init__(self) -> None:
        self._save: _AsyncSave | None = None

    def watch(self, handle: SaveHandle, coordinator: Coordinator, *, is_joint: bool) -> SaveHandle:
        """Watch a save that was begun; every rank calls this.

        Args:
            handle: What ``CheckpointIO.save`` returned.
            coordinator: Of all ranks.
            is_joint: Whether the handle has the same outcome on every rank already.

        Returns:
            What the user gets: a handle whose ``committed`` has the same outcome on every rank.
        """
        if is_joint:
            if handle.was_complete:
                return handle
        elif not coordinator.any_true(not (handle.committed.done() and handle.committed.exception() is None)):
            return handle
        save = _AsyncSave(handle, is_joint=is_joint)
        save.begin(coordinator)
        self._save = save
        return save.handle

    def wait_until_staged(self) -> None:
        """Wait until what is being saved may change, other than by a step."""
        if self._save is not None:
            concurrent.futures.wait([self._save.handle.staged])

    def begin_step(self) -> None:
        """Wait until an optimizer may change what is being saved.

        Raises:
            ShardError: What made the save fail, at the same step on every rank.
        """
        if self._save is not None and self._save.ends_before_step():
            self.settle()

    def settle(self) -> None:
        """Wait until no save is under way; every rank calls this at the same point.

        Raises:
            ShardError: What made the save fail, unless that was reported.
        """
        save, self._save = self._save, None
        if save is not None:
            save.settle()


class _AsyncSave:
    """One save, and when its failure is raised.

    The ranks learn of a failure at different moments, but must raise it at the same step: what follows are
    collectives. So they agree on the first step that none of them has begun; until they have, none begins another.

    Args:
        handle: The save, as far as this rank knows.
        is_joint: Whether that is what every rank knows.
    """

    def __init__(self, handle: SaveHandle, *, is_joint: bool) -> None:
        self._local = handle.committed
        self._is_joint = is_joint
        self._outcome = _Outcome()
        self.handle = SaveHandle(path=handle.path, staged=handle.staged, committed=self._outcome)
        self._turn = threading.Condition()
        self._agreeing = False
        self._steps = 0
        self._last_step: int | None = None

    def begin(self, coordinator: Coordinator) -> None:
        """Start to watch it in a background thread."""
        run_in_background(coordinator, self._watch, self._outcome, name="shard-save-watch")
        _unreported.add(self)

    def ends_before_step(self) -> bool:
        """Wait until training may change the tensors; then count a step, unless the save's failure is due before it."""
        concurrent.futures.wait([self.handle.staged])
        with self._turn:
            self._turn.wait_for(lambda: not self._agreeing)
            self._steps += 1
            return self._outcome.done() if self._last_step is None else self._steps > self._last_step

    def settle(self) -> None:
        """Wait for the end; raise a failure that was not reported."""
        retrieved = self._outcome.retrieved
        failure = self._outcome.exception()
        _unreported.discard(self)
        if failure is not None and not retrieved:
            raise failure

    def failure(self) -> BaseException | None:
        """Return a failure that was not reported, once the save has ended."""
        return self._outcome.exception() if self._outcome.done() and not self._outcome.retrieved else None

    def _watch(self, others: Coordinator) -> None:
        try:
            if self._is_joint:
                self._ended()
            else:
                on_all_ranks(others, f"saving {str(self.handle.path)!r}", self._ended)
        except CollectiveError:
            self._last_step = 0  # the ranks can agree on nothing any more
            raise
        except Exception:
            self._agree_on_last_step(others)
            raise

    def _ended(self) -> None:
        """Wait for the save on this rank; its result is of no use to others."""
        self._local.result()

    def _agree_on_last_step(self, others: Coordinator) -> None:
        with self._turn:
            self._agreeing = True
            steps = self._steps
        last = 0
        try:
            last = max(others.gather_objects(steps))
        finally:
            with self._turn:
                self._last_step = last
                self._agreeing = False
                self._turn.notify_all()


class _Outcome(Future[None]):
    """What became of a save; records whether anybody has retrieved it."""

    retrieved = False

    def result(self, timeout: float | None = None) -> None:
        """Raise what made the save fail."""
        self.exception(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what made the save fail."""
        failure = super().exception(timeout)
        self.retrieved = True
        return failure


_unreported: set[_AsyncSave] = set()


def _report_at_exit() -> None:
    """Print which saves have failed and were not reported, and fail the process too.

    The interpreter has waited for the saves' threads by now. Nothing that is raised here would change the exit
    status, which is all a scheduler sees.
    """
    failures = [failure for failure in [save.failure() for save in _unreported] if failure is not None]
    if not failures:
        return
    for failure in failures:
        print(f"A save in the background failed: {failure}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


# Registered at import: what was registered later runs earlier, and would not run after this.
atexit.register(_report_at_exit)
