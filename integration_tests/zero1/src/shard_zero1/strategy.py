"""ZeRO stage 1: DistributedDataParallel, and optimizers whose state of a parameter stands on the rank that owns it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.optim import ZeroRedundancyOptimizer

from shard_core import Strategy
from shard_core.backend import DDPModules, TensorState, TorchEngine, owned_step
from shard_zero1.config import Zero1Config
from shard_zero1.plugin import ZERO1

if TYPE_CHECKING:
    import torch

    from shard_core.backend import ParameterNames, TrainingState


class Zero1Strategy(TorchEngine, Strategy):
    """Steps each parameter on one rank, which alone keeps the optimizer's state of it and sends what comes of it."""

    default_info = ZERO1
    config_type = Zero1Config
    config: Zero1Config

    def engine_mesh(self) -> None:
        self._ddp = DDPModules(self.root_device, find_unused_parameters=self.config.find_unused_parameters)
        self._zero: dict[torch.optim.Optimizer, ZeroRedundancyOptimizer] = {}
        self._owned: set[int] = set()

    def engine_setup(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: ParameterNames
    ) -> torch.nn.Module:
        module.to(self.root_device)
        wrapped = self._ddp.wrap(module)
        for optimizer in optimizers:
            self.engine_add_optimizer(module, optimizer, names)
        return wrapped

    def engine_add_optimizer(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, names: ParameterNames
    ) -> None:
        super().engine_add_optimizer(module, optimizer, names)
        self._shard(optimizer)

    def _shard(self, optimizer: torch.optim.Optimizer) -> ZeroRedundancyOptimizer:
        """Divide the parameters of an optimizer among ranks; of groups that were added, too."""
        groups = optimizer.param_groups
        if optimizer in self._zero and len(self._zero[optimizer].param_groups) == len(groups):
            return self._zero[optimizer]

        def own(mine: Sequence[Mapping[str, Any]], **_: Any) -> torch.optim.Optimizer:
            self._owned |= {id(parameter) for group in mine for parameter in group["params"]}
            return optimizer  # the user's own takes the steps, so that its hooks run and its state is kept in it

        parts = [{"params": group["params"]} for group in groups]
        zero = ZeroRedundancyOptimizer(parts, optimizer_class=own)  # type: ignore[arg-type]  # it calls it, no more
        for parameter in [each for each in optimizer.state if not self._owns(each)]:
            del optimizer.state[parameter]
        zero.param_groups = [*groups]  # the very groups, or a step would take hyper-parameters back to those of now
        self._zero[optimizer] = zero
        return zero

    def _owns(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._owned

    def engine_backward(self, loss: torch.Tensor, module: torch.nn.Module, **kwargs: Any) -> None:
        self._ddp.backward(loss, module, **kwargs)

    def engine_no_sync(self, module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        return self._ddp.no_sync(module)

    def engine_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, **kwargs: Any) -> None:
        zero = self._shard(optimizer)  # closures are not declared, so core refuses them
        with owned_step(optimizer, self._owns):
            zero.step(**kwargs)  # which steps this very optimizer, and broadcasts what its owners have stepped

    def engine_state(
        self, modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> TrainingState:
        for optimizer in optimizers.values():
            self._shard(optimizer)
        return TensorState(modules, optimizers, rank=self.global_rank, world_size=self.world_size, owned=self._owns)

    def engine_teardown(self) -> None:
        self._ddp.teardown()
        self._zero.clear()
