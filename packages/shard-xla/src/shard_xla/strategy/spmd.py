"""Fully sharded data parallel training in one process: XLA's compiler spreads tensors over all devices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shard_core import Strategy
from shard_core.backend import NoInferenceMode, SingleCollectives, TorchEngine
from shard_xla.checkpoint import SPMDState
from shard_xla.config import XLASPMDConfig
from shard_xla.plugin import SPMD
from shard_xla.strategy import runtime, spmd_sharding
from shard_xla.strategy.engine import XLAEngine
from shard_xla.strategy.module_tensors import ModuleTensors, check_on_host, release, take_own_names, tensors_of_average
from shard_xla.strategy.normalization import correct_normalization
from shard_xla.strategy.optimizers import check_stale_parameters, repoint_to_devices, spread_value
from shard_xla.strategy.recompilation import RecompilationWatch
from shard_xla.strategy.tracing import stepping_lists
from shard_xla.strategy.units import check_classes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shard_core.backend import FlatPart, ParameterNames, TrainingState


class XLASPMDStrategy(XLAEngine, TorchEngine, Strategy):
    """Spreads parameters, gradients, optimizer state and samples over all XLA devices of one process.

    To torch every tensor is whole and there is one rank, which sees the global batch; the compiler
    shards tensors and inserts the messages. A process that has begun so cannot do otherwise any more.

    Example:
        >>> XLASPMDStrategy(virtual_devices=4).config.virtual_devices
        4
    """

    default_info = SPMD
    config_type = XLASPMDConfig
    config: XLASPMDConfig
    engine_minds_plain_backward = True
    engine_collectives_types = {"single": SingleCollectives}  # devices communicate inside the compiled graph
    engine_keeps_torch_tensors = False  # a copy of a tensor would be on one device
    _tensors: weakref.WeakKeyDictionary[torch.nn.Module, ModuleTensors]
    _watch: RecompilationWatch
    _devices: Any

    def engine_mesh(self) -> DeviceMesh | None:
        """Start the devices; none of them is a rank."""
        runtime.check_accelerator(self.info.name, self.options.accelerator)
        runtime.start(self.info.name, devices=self.config.virtual_devices, spmd=True)
        self._tensors = weakref.WeakKeyDictionary()
        self._watch = RecompilationWatch()
        self._devices = spmd_sharding.make_mesh()
        return None

    def engine_teardown(self) -> None:
        """Release the modules; there are none where the device was not started."""
        if "_tensors" in vars(self):
            self._tensors.clear()

    def engine_setup(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: ParameterNames
    ) -> torch.nn.Module:
        """Move the module to the devices, tied as it is, and shard it."""
        check_on_host(names)
        check_classes(module, self.config)
        tensors = ModuleTensors(module)
        correct_normalization(module)
        spmd_sharding.to_device(module, self.root_device)
        for parameter in module.parameters():
            spmd_sharding.shard_tensor(parameter, self._devices)
        self._tensors[module] = tensors
        repoint_to_devices(optimizers, names, tensors, self._devices)
        release(names)
        root = spmd_sharding.wrap(module, self.config, self._devices)
        take_own_names(module)
        NoInferenceMode(root)
        return root

    def engine_add_optimizer(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, names: ParameterNames
    ) -> None:
        """Point the optimizer at the parameters on the devices."""
        repoint_to_devices([optimizer], names, self._tensors[module], self._devices)

    def engine_lay_out_state(self, parameter: torch.Tensor, slot: str, value: torch.Tensor) -> torch.Tensor:
        """Spread whole values over the devices."""
        spread: torch.Tensor = spread_value(self._devices, parameter, slot, value)
        return spread

    def engine_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, **kwargs: Any) -> None:
        """Step, and run what is pending: else the graph would grow from step to step."""
        import torch_xla

        check_stale_parameters(self.info.name, optimizer, self._tensors)
        with stepping_lists(optimizer):
            super().engine_step(optimizer, closure, **kwargs)
        torch_xla.sync()
        self._watch.step()

    def engine_state(
        self, modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> TrainingState:
        """Describe which part of which tensor each device holds."""
        tensors = {
            key: self._tensors[module] if module in self._tensors else tensors_of_average(module)
            for key, module in modules.items()
        }
        return SPMDState(tensors, optimizers, self._zeros_like)

    def engine_flat_parts(self, module: torch.nn.Module) -> Mapping[torch.Tensor, FlatPart]:
        """Return none: to torch all tensors are whole, however the compiler spreads them."""
        del module
        return {}

    def engine_copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copy a parameter, and spread the copy over the devices."""
        copy = super().engine_copy(tensor, dtype)
        return spmd_sharding.shard_tensor(copy, self._devices) if isinstance(tensor, torch.nn.Parameter) else copy

    def _zeros_like(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # From the host: zeros made on the device would be a constant, of which every device keeps all.
        return spmd_sharding.shard_tensor(torch.zeros(parameter.shape, dtype=dtype).to(self.root_device), self._devices)
