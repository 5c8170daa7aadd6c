"""What a strategy holds, and how it starts: construction, launch, joining the ranks, devices and ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shard_core.checkpoint.interface import CheckpointIO
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.collectives.interface import Collectives
from shard_core.collectives.same_options import check_same_options
from shard_core.data import DrawnRounds
from shard_core.errors import BrokenBackend, InvalidOption, LaunchError, MissingCapability, nearest
from shard_core.launcher.choice import choose_launcher
from shard_core.launcher.environment import export
from shard_core.launcher.rank_call import report_failure
from shard_core.mesh import DataRanks
from shard_core.options import OF_THE_LOOP, check_names, options_of
from shard_core.precision.build import build_precision
from shard_core.randomness import seed_data_rank, seed_everything
from shard_core.run_options import RunOptions
from shard_core.strategy.async_saves import AsyncSaves
from shard_core.strategy.engine import Engine
from shard_core.strategy.placement import Placement
from shard_core.strategy.registry import Registry

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shard_core.capability import Capability
    from shard_core.plugins.info import StrategyInfo

T = TypeVar("T")

#: What the author of a strategy's class sets on it.
_DECLARED = {
    "default_info": "the StrategyInfo of its plugin.py",
    "config_type": "the frozen dataclass of its options, the one whose options_of() its StrategyInfo has",
}


class StrategyLifecycle(Engine):
    """Holds the parts, launches the ranks and joins them."""

    def __init__(self, *, info: StrategyInfo | None = None, **arguments: Any) -> None:
        for name, wanted in _DECLARED.items():
            if not hasattr(type(self), name):
                raise BrokenBackend(f"{type(self).__name__} has no {name}; set it in the class, to {wanted}.")
        self.info = info or self.default_info
        common = {field.name for field in dataclasses.fields(RunOptions)}
        own = {name: value for name, value in arguments.items() if name not in common}
        known = [option.name for option in (*options_of(self.config_type), *options_of(RunOptions))]
        check_names(f"strategy {self.info.name!r}", own, known, {**OF_THE_LOOP, **self.info.refused})
        self.options = RunOptions(**{name: value for name, value in arguments.items() if name in common})
        self.config = self.config_type(**{**self.info.presets, **own})
        self._check_presets()
        precision = self.options.precision
        self.precision = self.engine_precision(
            build_precision(self.info.policies.get(precision, precision) if isinstance(precision, str) else precision)
        )
        self.engine_check_options()
        chosen = self.options.collectives
        self.collectives = (
            chosen if isinstance(chosen, Collectives) else self.engine_collectives(self._collectives_name(chosen))
        )
        self.checkpoint_io = self.options.checkpoint_io or ShardedCheckpointIO()
        if not isinstance(self.checkpoint_io, CheckpointIO):
            raise InvalidOption(
                f"checkpoint_io is {self.checkpoint_io!r}; give a CheckpointIO, or None for the default."
            )
        self._registry = Registry()
        self._rounds = DrawnRounds()
        self._saves = AsyncSaves()
        self._placement: Placement | None = None
        self._mesh: DeviceMesh | None = None
        self._data = DataRanks(rank=0, size=1)

    def _check_presets(self) -> None:
        """Refuse a plain value that makes the strategy's name untrue; an object in place of a preset is allowed."""
        for name, preset in self.info.presets.items():
            value = getattr(self.config, name)
            if isinstance(value, bool | int | str | None) and value != preset:
                raise InvalidOption(
                    f"{name} is {value!r}, but strategy {self.info.name!r} stands for {name}={preset!r}; leave it out, "
                    "or choose another strategy (`shard list` shows them)."
                )

    def _collectives_name(self, chosen: str | None) -> str:
        names = list(type(self).engine_collectives_types)
        name = names[0] if chosen is None else chosen
        if name not in names:
            raise InvalidOption(
                f"strategy {self.info.name!r} has no collectives {name!r}{nearest(name, names) or ';'} it has: "
                f"{', '.join(map(repr, names))}."
            )
        return name

    def __repr__(self) -> str:
        """Return the name, the precision and the options."""
        return f"{type(self).__name__}({self.info.name!r}, precision={self.precision.policy.name!r}, {self.config})"

    def launch(self, function: Callable[..., T], *args: Any) -> T | None:
        """Run ``function(strategy, *args)`` on every rank.

        Under torchrun, SLURM, MPI or a Kubernetes training job this joins the ranks that exist;
        otherwise it starts ``devices`` ranks on this host. A world of one runs in this process.

        Args:
            function: What to run; new processes must be able to import it.
            args: Passed on; they must be picklable where ranks are started.

        Returns:
            What rank 0 returned; None in a process that is another rank.

        Raises:
            LaunchError: If the function or an argument cannot be pickled, or devices are lacking.
            RankFailed: If a rank raised or died.
        """
        if not callable(function):
            raise LaunchError(f"launch() was given {function!r}; give a function that takes the strategy.")
        placement = Placement(self.options, self.info)
        launcher = self.options.launcher or choose_launcher(placement.local_ranks, placement.process)
        result: T = launcher.launch(_run, self, function, *args)
        return result if placement.rank == 0 else None

    def setup_environment(self) -> None:
        """Join the ranks that exist, each of which calls this, or stand alone; does nothing the second time.

        Raises:
            LaunchError: If several ranks were asked for and none were started.
            InvalidOption: If ranks were given different options.
            MissingRank: If a rank does not come within ``guard_timeout``.
        """
        if self._placement is not None:
            return
        placement = Placement(self.options, self.info)
        placement.check_started()
        if placement.process is not None:
            export(placement.process)
        if placement.device.type == "cuda":
            torch.cuda.set_device(placement.device)
        self.collectives.connect(placement.rank, placement.world_size, placement.device)
        own = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(self.config)}
        check_same_options(self.info.name, {"precision": self.precision.policy.name, **own}, self.collectives)
        self._placement = placement
        self._mesh = self.engine_mesh()
        self.engine_seed(torch.initial_seed())
        self._data = DataRanks.along(self._mesh, placement.rank, placement.world_size)

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self._place.device

    @property
    def global_rank(self) -> int:
        """This process's place in the world, from 0."""
        return self._place.rank

    @property
    def local_rank(self) -> int:
        """This process's place on its host, from 0."""
        return self._place.local_rank

    @property
    def local_world_size(self) -> int:
        """How many ranks there are on this host."""
        return self._place.local_ranks

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._place.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the rank that prints and logs."""
        return self.global_rank == 0

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The devices by named axes; None where the engine has no mesh."""
        self.setup_environment()
        return self._mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """``num_replicas`` and ``rank`` among the ranks that see different data."""
        self.setup_environment()
        return {"num_replicas": self._data.size, "rank": self._data.rank}

    def seed_everything(self, seed: int) -> None:
        """Seed every generator: same seed, same initial weights under every strategy and size.

        Args:
            seed: From 0 to 2**32 - 1.
        """
        seed_everything(seed)
        if self._placement is not None:
            if len(self._registry):  # before, weights are drawn, and alike; from setup on each data rank has its own
                seed_data_rank(self._data.rank)
            self.engine_seed(torch.initial_seed())

    @property
    def _place(self) -> Placement:
        self.setup_environment()
        assert self._placement is not None
        return self._placement

    def _require(self, capability: Capability, cure: str = "") -> None:
        if capability not in self.info.capabilities:
            name = self.info.name
            raise MissingCapability(
                f"strategy {name!r} does not promise {capability.name}: it is not one that {capability.value}; "
                f"{cure or f'`shard show {name}` lists what it promises'}."
            )


def _run(strategy: Any, function: Callable[..., T], *args: Any) -> T:
    """Run a user's function on this rank, between start and stop."""
    with strategy:
        try:
            return function(strategy, *args)
        except Exception as error:
            report_failure(error)
            raise
