"""One rank seen from its parent: a process, the pipe to it and the file it prints to."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Pipe
from pathlib import Path

from shard_core.testing.processes.fork_server import Surroundings, fork_server

_END_SECONDS = 5.0


class RankProcess:
    """A running rank.

    Args:
        rank: Its place in the world.
        size: How many ranks the world has.
        port: Where the world's store listens.
        environment: Variables it is started with, beside this process's and those that place it.

    Attributes:
        rank: Its place in the world.
        connection: This end of the pipe to it.
    """

    def __init__(self, rank: int, size: int, port: int, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self._folder = tempfile.TemporaryDirectory(prefix="shard-rank-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name) / "output.txt"
        self._seen = 0
        self.connection, theirs = Pipe()
        self._server = fork_server(rank, environment)
        surroundings = Surroundings(
            environment={**os.environ, **environment, **_environment(rank, size, port)},
            path=tuple(sys.path),
            folder=os.getcwd(),
            output=self._log,
        )
        self._pid = self._server.fork(surroundings, theirs.fileno())
        self._exit_code: int | None = None
        theirs.close()

    @property
    def exit_code(self) -> int | None:
        """Return its exit code, or ``None`` while it lives."""
        if self._exit_code is None:
            self._exit_code = self._server.exit_code(self._pid)
        return self._exit_code

    def send(self, request: bytes) -> None:
        """Send it a request; a dead rank shows when its answer is awaited."""
        self._seen = self._log.stat().st_size
        with contextlib.suppress(OSError):
            self.connection.send_bytes(request)

    def receive(self) -> bytes | None:
        """Receive its answer, or ``None`` if it has closed the pipe: then it is gone."""
        try:
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            self._wait()
            return None

    def printed(self, lines: int = 40) -> str:
        """Return the end of what it printed since the last request."""
        return "\n".join(self._read(self._seen).splitlines()[-lines:])

    def stack(self) -> str:
        """Return where it is now, innermost call first, or what it printed last if it does not answer."""
        before = self._log.stat().st_size
        os.kill(self._pid, signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        while self._log.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # the dump is written line by line
        return _without_harness(self._read(before)) or f"it does not say; it printed:\n{self.printed()}"

    def kill(self) -> None:
        """Kill it and whatever it started, at once."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self._wait()
        self._folder.cleanup()

    def _wait(self) -> None:
        """Wait until it has ended, for a process that is about to."""
        deadline = time.monotonic() + _END_SECONDS
        while self.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.001)

    def _read(self, start: int) -> str:
        with self._log.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what torchrun would set for a rank of a world on one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }


def _without_harness(dump: str) -> str:
    """Remove from a dump of stacks what is the same in every run: our own frames and the import system's."""
    threads = [text for text in dump.strip().split("\n\n") if " in _listen\n" not in text]
    lines = [line for line in "\n\n".join(threads).splitlines() if "<frozen importlib" not in line]
    return re.sub(r"\n  File [^\n]*rank\.py\", line \d+ in _run\b.*", "", "\n".join(lines), flags=re.DOTALL)
