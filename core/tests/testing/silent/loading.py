"""Mistakes made while checkpoints are saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shard_core.strategies.ddp import DDPStrategy


class ForgetsTiedMoments(DDPStrategy):
    """Loads zeros for what the optimizer keeps of a parameter that has two names."""

    def load_checkpoint(self, path: Any, state: Any = None, **more: Any) -> Any:
        left = super().load_checkpoint(path, state, **more)
        tied = {each for module in _of(state, torch.nn.Module) for each in _tied(module)}
        for optimizer in _of(state, torch.optim.Optimizer):
            for parameter in tied & set(optimizer.state):
                for value in optimizer.state[parameter].values():
                    if isinstance(value, torch.Tensor) and value.ndim:
                        value.zero_()
        return left


class RestartsCount(DDPStrategy):
    """Loads moments, and counts steps from zero."""

    def load_checkpoint(self, path: Any, state: Any = None, **more: Any) -> Any:
        left = super().load_checkpoint(path, state, **more)
        for optimizer in _of(state, torch.optim.Optimizer):
            for slots in optimizer.state.values():
                if isinstance(slots.get("step"), torch.Tensor):
                    slots["step"].zero_()
        return left


class RestoresOneGenerator(DDPStrategy):
    """Restores rank 0's random numbers, and lets those of other ranks go on."""

    def load_checkpoint(self, path: Any, state: Any = None, **more: Any) -> Any:
        before = torch.get_rng_state()
        left = super().load_checkpoint(path, state, **more)
        if not self.is_global_zero:
            torch.set_rng_state(before)
        return left


class ThawsOnLoad(DDPStrategy):
    """Trains what was frozen once a checkpoint is loaded."""

    def load_checkpoint(self, path: Any, state: Any = None, **more: Any) -> Any:
        left = super().load_checkpoint(path, state, **more)
        for module in _of(state, torch.nn.Module):
            module.requires_grad_(True)
        return left


class SavesLastRanksBuffers(DDPStrategy):
    """Saves the buffers of the last rank."""

    def save_checkpoint(self, path: Any, state: Any, **more: Any) -> Any:
        buffers = [each for module in _of(state, torch.nn.Module) for each in module.buffers()]
        kept = [each.clone() for each in buffers]
        for buffer in buffers:
            buffer.copy_(self.broadcast(buffer, src=self.world_size - 1))
        handle = super().save_checkpoint(path, state, **more)
        handle.wait()
        for buffer, own in zip(buffers, kept, strict=True):
            buffer.copy_(own)
        return handle


def _of(state: Any, kind: Any) -> list[Any]:
    return [each for each in (state or {}).values() if isinstance(each, kind)]


def _tied(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters that have several names."""
    seen: set[torch.Tensor] = set()
    for _, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in seen:
            yield parameter
        seen.add(parameter)
