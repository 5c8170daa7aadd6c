"""Mistakes made while an optimizer steps; its groups show what the user has set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shard_core.strategies.ddp import DDPStrategy


class _OtherSettings(DDPStrategy):
    """Steps with other settings than those of the groups."""

    def settings(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def engine_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, **more: Any) -> None:
        with self._exchanged(optimizer):
            super().engine_step(optimizer, closure, **more)

    @contextlib.contextmanager
    def _exchanged(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        others = [self.settings(optimizer, group) for group in optimizer.param_groups]
        kept = [
            {name: group[name] for name in more} for group, more in zip(optimizer.param_groups, others, strict=True)
        ]
        for group, more in zip(optimizer.param_groups, others, strict=True):
            group.update(more)
        try:
            yield
        finally:
            for group, before in zip(optimizer.param_groups, kept, strict=True):
                group.update(before)


class TakesSigns(DDPStrategy):
    """Steps what Muon orthogonalizes by signs instead, as another rule does; its momentum is right."""

    def engine_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, **more: Any) -> None:
        muon = isinstance(optimizer, torch.optim.Muon)
        stepped = [each for group in optimizer.param_groups for each in group["params"]] if muon else []
        before = [each.detach().clone() for each in stepped]
        super().engine_step(optimizer, closure, **more)
        with torch.no_grad():
            for parameter, weights in zip(stepped, before, strict=True):
                if parameter.grad is not None:
                    momentum = optimizer.state[parameter]["momentum_buffer"]
                    parameter.copy_(weights - optimizer.param_groups[0]["lr"] * momentum.sign())


class LevelsRates(_OtherSettings):
    """Steps every group at the learning rate of the first."""

    def settings(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
        return {"lr": optimizer.param_groups[0]["lr"]}


class LevelsDecay(_OtherSettings):
    """Steps every group with the weight decay of the first."""

    def settings(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
        return {"weight_decay": optimizer.param_groups[0]["weight_decay"]}


class KeepsFirstRate(_OtherSettings):
    """Steps at the learning rates of the first step."""

    def settings(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
        rates = self.__dict__.setdefault("rates", {})
        first = rates.setdefault(optimizer, [each["lr"] for each in optimizer.param_groups])
        return {"lr": first[optimizer.param_groups.index(group)]}


class Minimizes(_OtherSettings):
    """Minimizes what shall be maximized."""

    def settings(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
        return {"maximize": False}


class CouplesDecay(_OtherSettings):
    """Exchanges AdamW for an Adam, whose weight decay is part of the gradient."""

    def settings(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
        return {"decoupled_weight_decay": False} if "decoupled_weight_decay" in group else {}


class ForgetsNesterov(_OtherSettings):
    """Exchanges SGD for one that knows plain momentum alone."""

    def settings(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
        return {"nesterov": False} if "nesterov" in group else {}


class StepsTheUnused(DDPStrategy):
    """Steps trained parameters without a gradient as if it were zero: they decay, and momentum moves them."""

    def engine_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, **more: Any) -> None:
        held = [each for group in optimizer.param_groups for each in group["params"]]
        unused = [each for each in held if each.grad is None and each.requires_grad and closure is None]
        for parameter in unused:
            parameter.grad = torch.zeros_like(parameter)
        super().engine_step(optimizer, closure, **more)
        for parameter in unused:
            parameter.grad = None


class ClosesLocally(DDPStrategy):
    """Steps with each rank's own gradients where a closure computes them."""

    closing = False

    def engine_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, **more: Any) -> None:
        self.closing = closure is not None
        super().engine_step(optimizer, closure, **more)
        self.closing = False

    def engine_backward(self, loss: torch.Tensor, module: Any, **more: Any) -> None:
        trained = [each for each in module.parameters() if each.requires_grad] if self.closing else []
        own = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True) if trained else ()
        super().engine_backward(loss, module, **more)
        for parameter, gradient in zip(trained, own, strict=True):
            parameter.grad = gradient
