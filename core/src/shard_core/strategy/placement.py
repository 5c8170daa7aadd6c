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

#: Ranks on CPUs may outnumber the CPUs, in tests for example, but a typing mistake must not bring the host down.
RANKS_PER_CPU = 8

#: Device types of which a process sees one device, and none of another rank's, if torch numbers it.
_ONE_PER_PROCESS: dict[str, torch.device] = {"cpu": torch.device("cpu"), "xla": torch.device("xla", 0)}


class Placement:
    """The ranks and devices of this host that the run options ask for.

    Args:
        options: The checked arguments of the strategy.
        info: Which devices and how many ranks the strategy runs on.

    Raises:
        InvalidOption: If the device is not one the strategy runs on.
        LaunchError: If more devices are asked for than there are, or other ranks exist than asked for.
    """

    def __init__(self, options: RunOptions, info: StrategyInfo) -> None:
        self.process: ProcessInfo | None = options.cluster_environment or detect()
        self.device_type = _device_type(options, info)
        self._options = options
        self._indices = _device_indices(options, self.device_type, self.process)
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
        one = _ONE_PER_PROCESS.get(self.device_type)
        return one or torch.device(self.device_type, self._indices[self.local_rank])

    def check_started(self) -> None:
        """Check that this process is not alone when several ranks were asked for.

        Raises:
            LaunchError: If ``devices`` or ``parallel_devices`` ask for more ranks than this one process.
        """
        asked = _asked(self._options)
        if self.process is None and len(self._indices) > 1 and asked is not None:
            raise LaunchError(
                f"{asked} asks for {len(self._indices)} ranks, but this process is alone; "
                "call strategy.launch(function), or start the script with `shard run --nproc-per-node "
                f"{len(self._indices)} ...`."
            )

    def _check_existing(self, process: ProcessInfo) -> None:
        asked = _asked(self._options)
        if asked is not None and len(self._indices) != process.local_world_size:
            raise LaunchError(
                f"{asked} asks for {len(self._indices)} ranks on this host, but {process.source} started "
                f"{process.local_world_size}; leave it out, or start as many as you ask for."
            )
        if self.device_type not in _ONE_PER_PROCESS and process.local_rank >= len(self._indices):
            raise LaunchError(
                f"{process.source} started {process.local_world_size} ranks on this host, but it has "
                f"{len(self._indices)} {self.device_type} devices; start at most one rank per device, or let the "
                "scheduler bind one to each task, as `srun --gpus-per-task=1` does."
            )


def _asked(options: RunOptions) -> str | None:
    """Return the argument by which the user has set the number of ranks; None for none."""
    if options.parallel_devices is not None:
        return f"parallel_devices={_shortened(options.parallel_devices)}"
    return None if options.devices == "auto" else f"devices={options.devices!r}"


def _shortened(devices: Sequence[torch.device]) -> str:
    shown = [repr(str(device)) for device in devices[:3]]
    return f"[{', '.join([*shown, '...'] if len(devices) > 3 else shown)}]"


def _device_type(options: RunOptions, info: StrategyInfo) -> str:
    supported, asked = info.devices, options.device_type
    if asked is None:
        if "cuda" in supported and torch.cuda.is_available():
            return "cuda"
        return "cpu" if "cpu" in supported else supported[0]
    if asked not in supported:
        raise InvalidOption(
            f"parallel_devices names {asked!r} devices, and strategy {info.name!r} runs on: {', '.join(supported)}."
            if options.parallel_devices is not None
            else f"accelerator {options.accelerator!r} is not one strategy {info.name!r} runs on; it runs on: "
            f"{', '.join(supported)}."
        )
    return asked


def _device_indices(options: RunOptions, device_type: str, process: ProcessInfo | None) -> list[int]:
    """Return the number of each local rank's device, as this process counts."""
    given = None if options.parallel_devices is None else _numbers(options.parallel_devices)
    if device_type == "cuda" and not torch.cuda.is_available():
        asked = "accelerator 'cuda'" if given is None else _asked(options)
        raise LaunchError(f"{asked} was asked for, but torch sees no CUDA device here; take CPUs instead.")
    there = torch.cuda.device_count() if device_type == "cuda" else None
    ranks = process.local_world_size if process else 1
    if given is None and there == 1 and options.devices in ("auto", ranks):
        # Bound to each task by the scheduler; where it is one device in truth, NCCL's collectives refuse to share it.
        return [0] * ranks
    if given is not None:
        indices = given
    elif options.devices == "auto":
        return list(range(there)) if there is not None else [0]
    elif isinstance(options.devices, int):
        indices = list(range(options.devices))
    else:
        indices = [int(index) for index in options.devices]
    if there is None and len(indices) > RANKS_PER_CPU * (os.cpu_count() or 1):
        raise LaunchError(
            f"{_asked(options)} asks for {len(indices)} ranks, but this host has {os.cpu_count()} CPUs and takes at "
            f"most {RANKS_PER_CPU} ranks for each; ask for fewer, or use more hosts."
        )
    if there is not None and max(indices) >= there:
        raise LaunchError(
            f"{_asked(options)} asks for device {max(indices)} of type {device_type}, but this host has {there} "
            f"(numbered from 0); CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}."
        )
    return indices


def _numbers(devices: Sequence[torch.device]) -> list[int]:
    """Return the devices' indices; one without an index is the first of its type."""
    numbers = [device.index or 0 for device in devices]
    for place, device in enumerate(devices):
        if device.type in _ONE_PER_PROCESS and numbers[place]:
            raise InvalidOption(
                f"parallel_devices names {device}, and a rank sees one {device.type} device only; leave the number out."
            )
        if device.type not in _ONE_PER_PROCESS and numbers[place] in numbers[:place]:
            raise InvalidOption(
                f"parallel_devices names {device.type}:{numbers[place]} twice; every rank needs its own."
            )
    return numbers
