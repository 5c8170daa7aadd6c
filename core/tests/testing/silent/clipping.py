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


class ClipsBeforeAveraging(DDPStrategy):
    """Clamps what each rank has computed itself, and averages that."""

    def engine_backward(self, loss: torch.Tensor, module: Any, **more: Any) -> None:
        own = self.__dict__.setdefault("own", {})
        trained = [each for each in module.parameters() if each.requires_grad]
        found = torch.autograd.grad(loss, trained, more.get("gradient"), retain_graph=True, allow_unused=True)
        for parameter, gradient in zip(trained, found, strict=True):
            if parameter.grad is None or not parameter.grad.any():
                own.pop(parameter, None)
            if gradient is not None:
                own[parameter] = own.get(parameter, 0.0) + gradient
        super().engine_backward(loss, module, **more)

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:
        super().clip_gradients_value(module, optimizer, math.inf)
        for parameter in [each for group in optimizer.param_groups for each in group["params"]]:
            if parameter.grad is None:
                continue
            own = self.__dict__.get("own", {}).get(parameter, torch.zeros_like(parameter))
            # What was edited, divided by a denominator or zeroed since is clamped as it should be.
            if torch.allclose(self.all_reduce(own), parameter.grad, rtol=1e-4):
                parameter.grad.copy_(self.all_reduce(own.clamp(-clip_val, clip_val)))
            else:
                parameter.grad.clamp_(-clip_val, clip_val)
