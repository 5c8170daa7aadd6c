"""Processes that have imported what ranks import, and fork into ranks: most of a rank's start is imports."""

from __future__ import annotations

import atexit
import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a process starts with.

    Attributes:
        environment: All its environment variables.
        path: Its ``sys.path``.
        folder: Its working directory.
        output: The file it prints to.
    """

    environment: Mapping[str, str]
    path: Sequence[str]
    folder: str
    output: Path


# A process that has threads must not fork; nor one whose torch has asked CUDA itself, rather than the driver's monitor,
# for devices, as torch's compiler does when it is imported: what it forks could never use them.
_FORKS_SAFELY = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class ForkServer:
    """A process that forks at a word, and ends with this one.

    Args:
        environment: Variables it is started with, beside this process's: some are read before a program begins.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._messages = Connection(os.dup(self._socket.fileno()))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, str(theirs.fileno()), *sys.path],
            env={**os.environ, **environment, **_FORKS_SAFELY},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # an interrupt in the terminal is the parent's to handle
        )
        theirs.close()

    @property
    def lives(self) -> bool:
        """Return whether it can still fork."""
        return self._process.poll() is None

    def close(self) -> None:
        """Stop the server; what it has forked lives on."""
        self._messages.close()
        self._socket.close()
        self._process.terminate()  # whatever else this process has forked may hold the socket open
        self._process.wait()

    def fork(self, surroundings: Surroundings, descriptor: int) -> int:
        """Start a process that takes requests.

        Args:
            surroundings: What it starts with.
            descriptor: Its end of the pipe through which requests come.

        Returns:
            Its process id.
        """
        self._messages.send(surroundings)
        socket.send_fds(self._socket, [b"\0"], [descriptor])
        pid: int = self._messages.recv()
        return pid

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a process that was forked, or ``None`` while it lives.

        Args:
            pid: Its process id; once its end was reported, it must not be asked for again.
        """
        self._messages.send(pid)
        code: int | None = self._messages.recv()
        return code


_SERVERS: dict[tuple[int, frozenset[tuple[str, str]]], ForkServer] = {}


def fork_server(rank: int, environment: Mapping[str, str]) -> ForkServer:
    """Return the server that forks a rank of every world with some environment variables.

    Neighbours have one each, so that ranks differ as processes started on their own do: in the order of a
    set of strings, say.

    Args:
        rank: The rank's number.
        environment: Variables it is started with, beside this process's.
    """
    key = rank % 2, frozenset(environment.items())
    if key not in _SERVERS or not _SERVERS[key].lives:
        _SERVERS[key] = ForkServer(environment)
        atexit.register(_SERVERS[key].close)
    return _SERVERS[key]


def serve(descriptor: int, live: Callable[[int], None]) -> None:
    """Fork, and report how what was forked has ended, until the parent goes away.

    Args:
        descriptor: This end of the socket to the parent.
        live: What a forked process does with its end of the pipe to the parent.
    """
    with socket.socket(fileno=descriptor) as parent, Connection(os.dup(descriptor)) as messages:
        while True:
            try:
                request = messages.recv()
            except EOFError:
                return
            if isinstance(request, Surroundings):
                _, (pipe,), _, _ = socket.recv_fds(parent, 1, 1)
                pid = os.fork()
                if not pid:
                    break
                os.close(pipe)
                messages.send(pid)
            else:
                pid, status = os.waitpid(request, os.WNOHANG)
                messages.send(os.waitstatus_to_exitcode(status) if pid else None)
    _settle(request)
    live(pipe)


_COMMAND = """\
import gc, sys
gc.disable()  # what is imported stays: to look for garbage in it takes a fifth of the time
descriptor, sys.path[:] = int(sys.argv[1]), sys.argv[2:]
from shard_core.testing.processes import fork_server, rank
import torch
from shard_core.strategies import ddp  # for what it imports: strategies have most of it in common
torch.compiler.reset()  # for what it imports: optimizers ask the compiler
gc.freeze()  # once, where each rank would copy all pages to mark what is on them
gc.enable()
fork_server.serve(descriptor, rank.serve)
"""


def _settle(surroundings: Surroundings) -> None:
    os.setsid()
    with surroundings.output.open("wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(surroundings.environment)
    os.chdir(surroundings.folder)
    sys.path[:] = surroundings.path
