"""Mistakes made while gradients are clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shard_core.gradients import LocalGradient, clip_norm
from shard_core.strategies.ddp import DDPStrategy


class _OwnNorm(DDPStrategy):
    """Clips by a norm of its own."""

    def norm(self, gradients: Sequence[LocalGradient], kind: float) -> torch.Tensor:
        raise NotImplementedError

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, *rest: Any, **more: Any
    ) -> torch.Tensor:
        super().clip_gradients_norm(module, optimizer, math.inf, norm_type, *rest, **more)
        gradients = [each for each in self.engine_gradients(optimizer) if each.tensor.numel()]
        norm = self.norm(gradients, norm_type) if gradients else torch.zeros(())
        clip_norm(gradients, max_norm, norm)
        return norm


class CountsCopies(_OwnNorm):
    """Counts what is no matrix once for each rank, as if its copies were shards."""

    def norm(self, gradients: Sequence[LocalGradient], kind: float) -> torch.Tensor:
        weight = self.world_size ** (1.0 / kind)
        parts = [each.tensor.flatten() * (weight if each.tensor.ndim < 2 else 1.0) for each in gradients]
        return torch.linalg.vector_norm(torch.cat(parts), kind)


class LargestIsLength(_OwnNorm):
    """Takes the infinity norm for the Euclidean one."""

    def norm(self, gradients: Sequence[LocalGradient], kind: float) -> torch.Tensor:
        parts = torch.cat([each.tensor.flatten() for each in gradients])
        return torch.linalg.vector_norm(parts, 2.0 if math.isinf(kind) else kind)


class ScalesByParts(DDPStrategy):
    """Returns the norm of all gradients, and scales those that each rank would own by the norm of these alone."""

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, *rest: Any, **more: Any
    ) -> torch.Tensor:
        norm = super().clip_gradients_norm(module, optimizer, math.inf, norm_type, *rest, **more)
        gradients = [each for each in self.engine_gradients(optimizer) if each.tensor.numel()]
        for rank in range(self.world_size):
            own = gradients[rank :: self.world_size]
            if own:
                whole = torch.cat([each.tensor.flatten() for each in own])
                clip_norm(own, max_norm, torch.linalg.vector_norm(whole, norm_type))
        return norm
