"""Watching the ranks' processes: which died first, and when; the ranks that outlive it are ended."""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import logging
import math
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from shard_core.launcher.report import DONE, read_report

if TYPE_CHECKING:
    from types import TracebackType

_POLL_SECONDS = 0.05
# How long the others may take to end once one rank died; torch's agent alone would wait 30 seconds for
# a rank that hangs in a collective with a SIGTERM handler of its own, and for ever for one that left
# by os._exit(0).
_GRACE_SECONDS = 3.0
# After how long a warning names ranks that go on while others have finished: they may wait for ever.
_STRAGGLER_SECONDS = 60.0

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Death:
    """The end of a rank's process before its call had returned.

    Attributes:
        rank: Who died.
        code: The exit status, negative for a signal; None if somebody else collected it first.
        when: When it was noticed, in seconds on the clock of reports.
    """

    rank: int
    code: int | None
    when: float


class Watch:
    """Watches the processes of one launch from a thread of the launching process.

    Once one rank has died it ends those that outlive it by some seconds. Collecting exit statuses is the agent's
    business, so this asks the system without taking them (``os.waitid`` with ``WNOWAIT``; systems without it go
    unwatched).

    Args:
        folder: Where the ranks report.
        num_processes: How many ranks there are.

    Attributes:
        deaths: The ends of ranks, in the order in which they were noticed.
        woke_agent: Whether the interrupt that ended the launch came from here.
    """

    def __init__(self, folder: str, num_processes: int) -> None:
        self.deaths: list[Death] = []
        self.woke_agent = False
        self._folder = folder
        self._num_processes = num_processes
        self._pids: dict[int, int] = {}
        self._warns_at = time.time() + _STRAGGLER_SECONDS
        self._in_main = threading.current_thread() is threading.main_thread()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        """Start the thread."""
        if hasattr(os, "waitid"):
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the thread."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            self._find_pids()
            self._warn_of_stragglers()
            living = {rank: pid for rank, pid in self._pids.items() if not self._has_ended(rank, pid)}
            if not self.deaths or time.time() < self.deaths[0].when + _GRACE_SECONDS:
                continue
            for pid in living.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not living and self._in_main:
                # Every rank is gone, yet the agent waits for a result: nothing else can wake it.
                if not self._over.wait(_GRACE_SECONDS):
                    self.woke_agent = True
                    _thread.interrupt_main()
                return

    def _warn_of_stragglers(self) -> None:
        """Warn once of ranks that go on while others have finished: they may wait in a collective."""
        if time.time() < self._warns_at:
            return
        self._warns_at = time.time() + _POLL_SECONDS * 20
        reports = {rank: read_report(self._folder, rank) for rank in self._pids}
        done = {rank: report.when for rank, report in reports.items() if report and report.state == DONE}
        going_on = [rank for rank in reports if rank not in done]
        if done and going_on and time.time() - max(done.values()) > _STRAGGLER_SECONDS:
            self._warns_at = math.inf
            log.warning(
                "rank %s finished %.0f s ago while rank %s goes on; if it waits there in a collective, the ranks "
                "did not take equally many steps, and it gives up after the strategy's `timeout`.",
                ", ".join(map(str, sorted(done))),
                time.time() - max(done.values()),
                ", ".join(map(str, sorted(going_on))),
            )

    def _find_pids(self) -> None:
        for rank in set(range(self._num_processes)).difference(self._pids):
            report = read_report(self._folder, rank)
            if report is not None:
                self._pids[rank] = report.pid

    def _has_ended(self, rank: int, pid: int) -> bool:
        try:
            state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            code = None
        else:
            if state is None:
                return False
            code = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
        if rank not in [death.rank for death in self.deaths]:
            report = read_report(self._folder, rank)
            if report is None or report.state != DONE or code:
                self.deaths.append(Death(rank=rank, code=code, when=time.time()))
        return True
