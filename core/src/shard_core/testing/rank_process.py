"""One rank seen from its parent: a process, the pipe to it and the file it prints to."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Pipe
from pathlib import Path


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
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(theirs.fileno()), *sys.path],
                env={**os.environ, **environment, **_environment(rank, size, port)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt in the terminal is the parent's to handle
            )
        theirs.close()

    @property
    def exit_code(self) -> int | None:
        """How it ended, or ``None`` while it lives."""
        return self._process.poll()

    def send(self, request: bytes) -> None:
        """Hand it a request; a dead rank shows when its answer is awaited."""
        self._seen = self._log.stat().st_size
        with contextlib.suppress(OSError):
            self.connection.send_bytes(request)

    def receive(self) -> bytes | None:
        """Take its answer, or ``None`` if it has closed the pipe: then it is gone."""
        try:
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
            return None

    def printed(self, lines: int = 40) -> str:
        """Return the end of what it printed since the last request."""
        return "\n".join(self._read(self._seen).splitlines()[-lines:])

    def stack(self) -> str:
        """Return where it is now, innermost call first, or what it printed last if it does not answer."""
        before = self._log.stat().st_size
        os.kill(self._process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        while self._log.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # the dump is written line by line
        return _without_harness(self._read(before)) or f"it does not say; it printed:\n{self.printed()}"

    def kill(self) -> None:
        """End it and whatever it started, at once."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()

    def _read(self, start: int) -> str:
        with self._log.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")


_COMMAND = """\
import sys
descriptor, sys.path[:] = int(sys.argv[1]), sys.argv[2:]
from shard_core.testing.rank import serve
serve(descriptor)
"""


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
    """Leave out of a dump of stacks what is the same in every run: our own frames and the import system's."""
    threads = [text for text in dump.strip().split("\n\n") if " in _listen\n" not in text]
    lines = [line for line in "\n\n".join(threads).splitlines() if "<frozen importlib" not in line]
    return re.sub(r"\n  File [^\n]*rank\.py\", line \d+ in _run\b.*", "", "\n".join(lines), flags=re.DOTALL)
