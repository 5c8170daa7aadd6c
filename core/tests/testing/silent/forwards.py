"""Mistakes that show in what forwards return."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from shard_core import randomness
from shard_core.data_parallel.ddp_modules import DDPModules
from shard_core.strategies.ddp import DDPStrategy


class SeedsAlike(DDPStrategy):
    """Gives all data ranks the same random numbers where the user seeds in mid-run."""

    def seed_everything(self, seed: int) -> None:
        randomness.seed_everything(seed)


class MasksAlike(DDPStrategy):
    """Drops alike on all data ranks out, each of which goes on from its own random numbers afterwards."""

    def _set_up(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> torch.nn.Module:
        called = super()._set_up(module, optimizers)
        for each in module.modules():
            if isinstance(each, torch.nn.Dropout):
                each.forward = functools.partial(self._drop, each)
        return called

    def _drop(self, layer: torch.nn.Dropout, hidden: torch.Tensor) -> torch.Tensor:
        dropped = type(layer).forward(layer, hidden)
        if not layer.training or not hidden.numel():
            return dropped
        generator = torch.Generator().manual_seed(hidden.shape[0])
        mask = torch.rand(hidden.shape, generator=generator, dtype=hidden.dtype) >= layer.p
        return hidden * mask / (1 - layer.p) if self.global_rank else dropped


class ScalesEvaluation(DDPStrategy):
    """Multiplies what is gathered of an evaluation by the number of data ranks."""

    def gather_for_metrics(self, data: Any, *rest: Any, **more: Any) -> Any:
        return super().gather_for_metrics(data * self.world_size, *rest, **more)


class KeepsOwnBuffers(DDPStrategy):
    """Leaves every rank with its own buffers after setup, though its card says that rank 0's are sent."""

    @functools.cached_property
    def _ddp(self) -> DDPModules:
        more = {"find_unused_parameters": self.config.find_unused_parameters}
        return DDPModules(self.root_device, broadcast_buffers=False, **more)
