"""The interface of launchers, which start the ranks and call one function on each; a process's place among ranks."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """This process's place among the ranks, as its environment has it.

    Attributes:
        source: Who started the ranks: ``"torchrun"``, ``"SLURM"``, ``"Open MPI"``, ...
        rank: Global rank, from 0.
        world_size: Number of ranks.
        local_rank: Rank on this host, from 0.
        local_world_size: Ranks on this host.
        node_rank: This host's number, from 0.
        main_address: Host name or address where rank 0 listens.
        main_port: TCP port there.
    """

    source: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    main_address: str
    main_port: int


class Launcher(abc.ABC):
    """Starts ranks, or joins those that exist."""

    @abc.abstractmethod
    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` on every rank and return what rank 0 returned.

        Args:
            function: A function importable by name in a new process.
            args: Arguments that can be pickled.

        Returns:
            The return value of global rank 0, where rank 0 runs on this host; otherwise ``None``.

        Raises:
            LaunchError: If the function or an argument cannot be pickled for another process.
            RankFailed: If a rank raised or died, with its own traceback.
        """
