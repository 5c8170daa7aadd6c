"""Fully sharded data parallel training on torch's ``fully_shard`` (FSDP2)."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule, fully_shard

from shard_core import Strategy
from shard_core.checkpoint.tensor_state import TensorState
from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.errors import InvalidOption, SetupError
from shard_core.initialization.materialize import Materializer, unset_parameters
from shard_core.initialization.recording import Recording, record
from shard_core.mesh import DATA_AXIS, MeshShape
from shard_core.precision.dtypes import dtype_named
from shard_core.replicas import AveragedScalars, send_values
from shard_core.strategy.torch_engine import TorchEngine
from shard_core.units import Unit, find_units, num_bytes
from shard_fsdp.config import FSDPConfig
from shard_fsdp.inference import NoInferenceMode
from shard_fsdp.plugin import FSDP

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from shard_core.checkpoint.state import TrainingState
    from shard_core.collectives.interface import Collectives
    from shard_core.parameters import ParameterNames

log = logging.getLogger(__name__)


class FSDPStrategy(TorchEngine, Strategy):
    """Keeps on every rank only a shard of parameters, gradients and optimizer state.

    Whole parameters exist for one unit at a time: neighbouring blocks of the module, joined until
    a message is worth sending.

    Example:
        >>> FSDPStrategy(devices=2, unit_bytes=2**20).config.unit_bytes
        1048576
    """

    default_info = FSDP
    config_type = FSDPConfig
    config: FSDPConfig
    _scalars: weakref.WeakKeyDictionary[torch.nn.Module, AveragedScalars]

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._recording: Recording | None = None
        self._leaves_parameters = False

    def engine_collectives(self, name: str | None) -> Collectives:
        """Talk through a process group."""
        if name not in (None, "process_group"):
            raise InvalidOption(f"strategy 'fsdp' has no collectives {name!r}; it has: 'process_group'.")
        return ProcessGroupCollectives(
            self.options.process_group_backend, self.options.timeout, self.options.guard_timeout
        )

    def engine_mesh(self) -> DeviceMesh:
        """Shard over all ranks."""
        # Made on the rank it serves: weak references cannot travel there with the strategy.
        self._scalars = weakref.WeakKeyDictionary()
        return MeshShape({DATA_AXIS: "auto"}).build(self.root_device.type)

    @contextlib.contextmanager
    def engine_init_context(self, empty_init: bool) -> Iterator[None]:
        """Note what constructors do instead of doing it; setup replays it shard by shard."""
        with record(self.collectives, after=self._recording) as recording:
            yield
        self._recording = recording
        self._leaves_parameters = empty_init

    def engine_setup(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: ParameterNames
    ) -> torch.nn.Module:
        """Shard the module unit by unit, then fill its shards with their values."""
        send_values(module)
        policy = self.precision.policy
        values = Materializer(module, dtype_named(policy.parameter), dtype_named(policy.buffer))
        units = find_units(module, self.config.unit_bytes)
        self._shard(module, units)
        values.allocate(self.root_device)
        values.set_aside(optimizers)
        names.repoint(optimizers, module)
        values.fill(parameters=not self._leaves_parameters)
        if self._leaves_parameters:
            self._refuse_unset(module)
        self._scalars[module] = AveragedScalars(module)
        NoInferenceMode(module)
        return module

    def _refuse_unset(self, module: torch.nn.Module) -> None:
        """Let the first forward make sure that a checkpoint has filled every parameter."""

        def check(called: torch.nn.Module, args: Any) -> None:
            del args
            unset = self.collectives.gather_objects(unset_parameters(called))
            names = sorted({name for names in unset for name in names})
            if names:
                raise SetupError(
                    f"{len(names)} parameters were built with empty_init=True and never filled, first {names[0]!r}; "
                    "call load_checkpoint() before the first forward."
                )
            handle.remove()

        handle = module.register_forward_pre_hook(check, prepend=True)

    def _shard(self, module: torch.nn.Module, units: Sequence[Unit]) -> None:
        # fully_shard refuses 0-d parameters; they stay whole on every rank.
        scalars = {parameter for parameter in module.parameters() if parameter.dim() == 0}
        shard = functools.partial(
            fully_shard,
            mesh=self.device_mesh,
            reshard_after_forward=self.config.reshard_after_forward,
            ignored_params=scalars,
        )
        for unit in units:
            shard(list(unit.modules))
        shard(module)
        total = num_bytes(module)
        for unit in units:
            log.info("unit %s: %.1f MiB", ", ".join(unit.names), unit.num_bytes / 2**20)
        rest = total - sum(unit.num_bytes for unit in units)
        log.info("root unit: %.1f of %.1f MiB, over %d ranks", rest / 2**20, total / 2**20, self.world_size)

    @contextlib.contextmanager
    def engine_no_sync(self, module: torch.nn.Module) -> Iterator[None]:
        """Let whole gradients add up on this rank."""
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(False)
        self._scalars[module].deferred = True
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)
            self._scalars[module].deferred = False

    def engine_state(
        self, modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> TrainingState:
        """Describe the shards."""
        for module in modules.values():
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    # After a forward without backward, a unit may still show its whole parameters.
                    part.reshard()
        return TensorState(
            modules, optimizers, rank=self.global_rank, world_size=self.world_size, mesh=self.device_mesh
        )
