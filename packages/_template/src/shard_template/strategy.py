"""Data parallel training by averaging gradients after each backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shard_core import Strategy
from shard_core.backend import TensorState, TorchEngine, send_values
from shard_template.config import TemplateConfig
from shard_template.plugin import TEMPLATE

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shard_core.backend import ParameterNames, TrainingState


class TemplateStrategy(TorchEngine, Strategy):
    """Keeps a whole copy of the module on every rank and averages gradients after each backward.

    Example:
        >>> TemplateStrategy(devices=2, send_buffers=True).config.send_buffers
        True
    """

    default_info = TEMPLATE
    config_type = TemplateConfig
    config: TemplateConfig
    _averaged: weakref.WeakKeyDictionary[torch.nn.Module, bool]

    def engine_mesh(self) -> DeviceMesh | None:
        """Return no mesh: every rank sees its own data."""
        # Made on the rank it serves: weak references cannot travel there with the strategy.
        self._averaged = weakref.WeakKeyDictionary()
        return None

    def engine_setup(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: ParameterNames
    ) -> torch.nn.Module:
        """Move the module to the device; rank 0's values go to all ranks."""
        module.to(self.root_device)
        names.repoint(optimizers, module)
        send_values(module)
        self._averaged[module] = True
        return module

    @contextlib.contextmanager
    def engine_no_sync(self, module: torch.nn.Module) -> Iterator[None]:
        """Sum gradients on this rank; the next backward outside averages their sum."""
        self._averaged[module] = False
        try:
            yield
        finally:
            self._averaged[module] = True

    def engine_backward(self, loss: torch.Tensor, module: torch.nn.Module, **kwargs: Any) -> None:
        """Run autograd, then average the gradients of every module: the loss may have come through several."""
        super().engine_backward(loss, module, **kwargs)
        modules = [each for each, averaged in self._averaged.items() if averaged]
        self._average([parameter for each in modules for parameter in each.parameters()])
        if self.config.send_buffers:
            self._send_buffers(modules)

    def _average(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        # Averaging what was averaged before changes nothing, so the sum over micro-batches comes out right.
        reached = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        reached = self.collectives.all_reduce(reached.to(self.root_device), reduce_op="max")
        for parameter, somewhere in zip(parameters, reached.tolist(), strict=True):
            if somewhere:
                local = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.collectives.all_reduce(local)

    def _send_buffers(self, modules: Sequence[torch.nn.Module]) -> None:
        for module in modules:
            for buffer in module.buffers():
                torch.distributed.broadcast(buffer.data, src=0)

    def engine_state(
        self, modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> TrainingState:
        """Describe whole tensors, which ranks write in turn."""
        return TensorState(modules, optimizers, rank=self.global_rank, world_size=self.world_size)
