"""Worlds of ranks in another environment, as test worlds here are.

As a script it is what holds them there: a process of that environment's interpreter, which runs what it is sent.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from shard_core.errors import RankFailed
from shard_core.testing.processes.worlds import Worlds


class EnvironmentWorlds:
    """The worlds of another environment: a callable from a size to a world, as the fixture ``worlds`` is one.

    Args:
        python: The environment's interpreter.
    """

    def __init__(self, python: Path) -> None:
        self._connection, theirs = Pipe()
        settings = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        command = [str(python), __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=settings, pass_fds=[theirs.fileno()])
        theirs.close()

    def __call__(self, size: int, environment: Mapping[str, str]) -> EnvironmentWorld:
        """Return the world of ``size`` ranks that were started with some environment variables."""
        return EnvironmentWorld(self._connection, size, environment)

    def close(self) -> None:
        """Stop all ranks, and who held them."""
        self._connection.close()
        self._process.wait(timeout=60)


class EnvironmentWorld:
    """One world of another environment.

    Args:
        connection: To the process that holds it.
        size: How many ranks.
        environment: Variables they are started with.
    """

    def __init__(self, connection: Connection, size: int, environment: Mapping[str, str]) -> None:
        self._connection = connection
        self._place = size, dict(environment)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call a function of a module in this folder on every rank; see ``World.run``."""
        self._connection.send_bytes(pickle.dumps((*self._place, function, args, timeout)))
        answer: list[Any] | RankFailed = pickle.loads(self._connection.recv_bytes())
        if isinstance(answer, RankFailed):
            raise answer
        return answer


def serve(connection: Connection) -> None:
    """Run what is sent until the other side has gone away."""
    worlds = Worlds()
    try:
        while True:
            size, environment, function, args, timeout = pickle.loads(connection.recv_bytes())
            try:
                answer: Any = worlds(size, environment).run(function, *args, timeout=timeout)
            except RankFailed as error:
                answer = error
            connection.send_bytes(pickle.dumps(answer))
    except EOFError:
        worlds.close()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
