"""Mistakes that a judge may overlook: behind a refusal, behind what looks like rounding, beside the values."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch

from shard_core.errors import CheckpointNotFound, SetupError
from shard_core.strategies.ddp import DDPStrategy


class RefusesToClip(DDPStrategy):
    """Makes no mistake: it refuses to clip by value."""

    def clip_gradients_value(self, module: Any, optimizer: torch.optim.Optimizer, clip_val: float) -> NoReturn:
        del module, clip_val
        self.change(optimizer)
        raise SetupError("gradients are not clipped by value here; clip them by norm.")

    def change(self, optimizer: torch.optim.Optimizer) -> None:
        """Change something before the refusal, as those below do."""


class RefusesWithoutMomentum(RefusesToClip):
    """Zeroes the optimizer's state before it refuses."""

    def change(self, optimizer: torch.optim.Optimizer) -> None:
        for slots in optimizer.state.values():
            for value in slots.values():
                value.zero_()


class RefusesAtHalfTheRate(RefusesToClip):
    """Halves the learning rate before it refuses."""

    def change(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] /= 2


class RefusesWithoutGradients(RefusesToClip):
    """Zeroes gradients before it refuses."""

    def change(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()


class RefusesOnceFrozen(RefusesToClip):
    """Freezes parameters before it refuses."""

    def change(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.requires_grad_(False)


class RefusesSeeded(RefusesToClip):
    """Draws a random number before it refuses."""

    def change(self, optimizer: torch.optim.Optimizer) -> None:
        del optimizer
        torch.rand(1)


class StepsNoMoreOnceRefused(RefusesToClip):
    """Remembers that it has refused, and steps no more."""

    _refused = False

    def change(self, optimizer: torch.optim.Optimizer) -> None:
        del optimizer
        self._refused = True

    def engine_step(self, optimizer: torch.optim.Optimizer, closure: Any, **more: Any) -> None:
        if not self._refused:
            super().engine_step(optimizer, closure, **more)


class RefusesInManyWords(DDPStrategy):
    """Refuses on each rank with a sentence of its own."""

    def clip_gradients_value(self, module: Any, optimizer: torch.optim.Optimizer, clip_val: float) -> NoReturn:
        del module, optimizer, clip_val
        raise SetupError("gradients are not clipped by value here; " + "clip them by norm " * (1 + self.global_rank))


class RefusesEverything(DDPStrategy):
    """Sets no module up."""

    def _set_up(self, *_: Any) -> NoReturn:
        raise SetupError("this module cannot be set up; take another.")


class RoundsFloat32(DDPStrategy):
    """Reduces gradients of float32 in bfloat16, as a table of dtypes that is wrong for one precision would."""

    def engine_backward(self, loss: torch.Tensor, module: Any, **more: Any) -> None:
        super().engine_backward(loss, module, **more)
        for parameter in module.parameters():
            if parameter.grad is not None and parameter.dtype == torch.float32:
                parameter.grad = parameter.grad.bfloat16().float()


class ShowsDoubles(DDPStrategy):
    """Returns state dicts in float64."""

    def module_state_dict(self, module: Any, full: bool = True) -> dict[str, torch.Tensor]:
        shown = super().module_state_dict(module, full)
        return {name: each.double() if each.is_floating_point() else each for name, each in shown.items()}


class ShowsWeightsEverywhere(DDPStrategy):
    """Fills every rank's memory with the state dict that is rank 0's."""

    def module_state_dict(self, module: Any, full: bool = True) -> dict[str, torch.Tensor]:
        shown = super().module_state_dict(module, full)
        return self.broadcast(shown) if full else shown


class HoldsModules(DDPStrategy):
    """Keeps what it has set up when it is torn down, as a cache of a library does."""

    _held: ClassVar[list[torch.nn.Module]] = []

    def _set_up(self, module: torch.nn.Module, *more: Any) -> torch.nn.Module:
        self._held.append(module)
        return super()._set_up(module, *more)


class LosesCheckpoints(DDPStrategy):
    """Finds no checkpoint, be it its own."""

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        raise CheckpointNotFound(f"{path} is no checkpoint.")
