"""Where the ranks of this host run, and on which device each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shard_core.errors import InvalidOption, LaunchError
from shard_core.launcher.environment import detect

if TYPE_CHECKING:
    from shard_core.launcher.interface import ProcessInfo
    from shard_core.plugins.info import StrategyInfo
    from shard_core.run_options import RunOptions

#: Ranks on CPUs may outnumber the CPUs, in tests say, but a slip of the finger must not bring the host down.
RANKS_PER_CPU = 8

#: Device types whose devices each process numbers for itself, from 0: it sees no other's.
_OWN_NUMBERS = ("xla",)


class Placement:
    """What the run options come to on this host.

    Args:
        options: The checked arguments of the strategy.
        info: What the strategy runs on.

    Raises:
        InvalidOption: If the device is not one the strategy runs on.
        LaunchError: If more devices are asked for than there are, or other ranks exist than asked for.
    """

    def __init__(self, options: RunOptions, info: StrategyInfo) -> None:
        self.process: ProcessInfo | None = options.cluster_environment or detect()
        self.device_type = _device_type(options, info.devices)
        self._options = options
        self._indices = _device_indices(options, self.device_type)
        if options.devices == "auto" and options.parallel_devices is None:
            self._indices = self._indices[: info.max_ranks]
        self.local_ranks = len(self._indices) if self.process is None else self.process.local_world_size
        ranks = self.process.world_size if self.process else self.local_ranks * options.num_nodes
        if info.max_ranks is not None and ranks > info.max_ranks:
            raise LaunchError(
                f"strategy {info.name!r} runs on at most {info.max_ranks} rank{'s' if info.max_ranks > 1 else ''}, not "
                f"on {ranks}; {info.beyond_max_ranks}."
            )
        if self.process is not None:
            self._check_existing(self.process)
        elif options.num_nodes > 1:
            raise LaunchError(
                f"num_nodes={options.num_nodes} needs a launcher on every host; start the script there with "
                f"`shard run --nnodes {options.num_nodes} ...`, torchrun, srun or mpirun."
            )

    @property
    def rank(self) -> int:
        """Global rank of this process; 0 in a world of one."""
        return self.process.rank if self.process else 0

    @property
    def local_rank(self) -> int:
        """Rank on this host; 0 in a world of one."""
        return self.process.local_rank if self.process else 0

    @property
    def world_size(self) -> int:
        """How many ranks exist now; 1 before any were started."""
        return self.process.world_size if self.process else 1

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        if self._options.parallel_devices is not None:
            return torch.device(self._options.parallel_devices[self.local_rank])
        if self.device_type == "cpu":
            return torch.device("cpu")
        if self.device_type in _OWN_NUMBERS:
            return torch.device(self.device_type, 0)
        return torch.device(self.device_type, self._indices[self.local_rank])

    def check_started(self) -> None:
        """Refuse to go on alone when several ranks were asked for and none were started.

        Raises:
            LaunchError: If ``devices`` asks for more ranks than this one process.
        """
        if self.process is None and len(self._indices) > 1 and self._options.devices != "auto":
            raise LaunchError(
                f"devices={self._options.devices!r} asks for {len(self._indices)} ranks, but this process is alone; "
                "call strategy.launch(function), or start the script with `shard run --nproc-per-node "
                f"{len(self._indices)} ...`."
            )

    def _check_existing(self, process: ProcessInfo) -> None:
        asked = self._options.devices
        if asked != "auto" and len(self._indices) != process.local_world_size:
            raise LaunchError(
                f"devices={asked!r} asks for {len(self._indices)} ranks on this host, but {process.source} started "
                f"{process.local_world_size}; leave devices='auto', or start as many as you ask for."
            )
        counted = self.device_type not in ("cpu", *_OWN_NUMBERS)
        if counted and process.local_rank >= len(self._indices):
            raise LaunchError(
                f"{process.source} started {process.local_world_size} ranks on this host, but it has "
                f"{len(self._indices)} {self.device_type} devices; start at most one rank per device."
            )


def _device_type(options: RunOptions, supported: Sequence[str]) -> str:
    if options.parallel_devices is not None:
        return torch.device(options.parallel_devices[0]).type
    if options.accelerator == "auto":
        if "cuda" in supported and torch.cuda.is_available():
            return "cuda"
        return "cpu" if "cpu" in supported else supported[0]
    if options.accelerator not in supported:
        raise InvalidOption(
            f"accelerator {options.accelerator!r} is not one this strategy runs on; it runs on: {', '.join(supported)}."
        )
    if options.accelerator == "cuda" and not torch.cuda.is_available():
        raise LaunchError("accelerator 'cuda' was asked for, but torch sees no CUDA device here; use 'cpu' or 'auto'.")
    return options.accelerator


def _device_indices(options: RunOptions, device_type: str) -> list[int]:
    if options.parallel_devices is not None:
        return list(range(len(options.parallel_devices)))
    there = torch.cuda.device_count() if device_type == "cuda" else None
    asked = options.devices
    if asked == "auto":
        return list(range(there)) if there is not None else [0]
    indices = list(range(asked)) if isinstance(asked, int) else [int(index) for index in asked]
    if there is None and len(indices) > RANKS_PER_CPU * (os.cpu_count() or 1):
        raise LaunchError(
            f"devices={asked!r} asks for {len(indices)} ranks, but this host has {os.cpu_count()} CPUs and takes at "
            f"most {RANKS_PER_CPU} ranks for each; ask for fewer, or use more hosts."
        )
    if there is not None and max(indices) >= there:
        raise LaunchError(
            f"devices={asked!r} asks for device {max(indices)} of type {device_type}, but this host has {there} "
            f"(numbered from 0); CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}."
        )
    return indices
