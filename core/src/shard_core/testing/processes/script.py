"""Running Python in processes of its own, as a user would, with what this process can import."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

#: How long processes that are asked to end may take.
_LEAVE_SECONDS = 15.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run of Python ended.

    Attributes:
        exit_code: Its exit code; None if it had to be ended.
        output: What it printed.
        errors: What it printed as errors.
    """

    exit_code: int | None
    output: str
    errors: str

    def __str__(self) -> str:
        """Format how it ended and what it printed."""
        how = "did not end in time" if self.exit_code is None else f"ended with exit code {self.exit_code}"
        return f"it {how}; it printed:\n{self.output}{self.errors}"


class PythonRun:
    """This interpreter at work in a process of its own, on this process's ``sys.path``.

    Args:
        arguments: A script and its arguments, or ``-m`` and a module.
        folder: The working directory; None for this process's.
        environment: Variables to add to this process's.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._was_ended = False
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=os.environ
            | dict(environment or {})
            | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A group is enough to end it by. A session of its own might be given as much time as this one has.
            process_group=0,
        )

    def outcome(self, timeout: float | None) -> Outcome:
        """Wait until it has ended; after some seconds, or when this is interrupted, end it and what it started.

        Args:
            timeout: How many seconds; None where somebody else calls ``end`` in time.

        Returns:
            How it ended.
        """
        with self._process:
            try:
                output, errors = self._process.communicate(timeout=timeout)
                code = None if self._was_ended else self._process.returncode
                return Outcome(exit_code=code, output=output, errors=errors)
            except subprocess.TimeoutExpired:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):  # read on: a full pipe would hold up its end
                    self._process.communicate(timeout=_LEAVE_SECONDS)
                self.end()
                output, errors = self._process.communicate()
                return Outcome(exit_code=None, output=output, errors=errors)
            except BaseException:
                self.end()
                raise

    def end(self) -> None:
        """Kill it with what it has started, whoever waits for it."""
        self._was_ended = True
        # Asked first: a launcher ends the ranks it has started, which may have sessions of their own.
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # what it has started may live on, and hold its pipes
            os.killpg(self._process.pid, signal.SIGKILL)


def run_python(arguments: Sequence[str], *, timeout: float = 180.0) -> Outcome:
    """Run this interpreter with arguments, on this process's ``sys.path``, and wait for it.

    Args:
        arguments: A script and its arguments, or ``-m`` and a module.
        timeout: Seconds until it is ended, with whatever it started.

    Returns:
        How it ended.
    """
    return PythonRun(arguments).outcome(timeout)
