"""Mistakes made while gradients add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shard_core.strategies.ddp import DDPStrategy

_Owner = torch.nn.Module | torch.optim.Optimizer


class _Deferred(DDPStrategy):
    """Does something else with gradients that waited for a backward."""

    waited = False

    def engine_backward(self, loss: torch.Tensor, module: Any, **more: Any) -> None:
        inside = any(known.inside_no_sync for known in self._registry)
        held = list(module.parameters())
        waiting = {each: each.grad.clone() for each in held if each.grad is not None}
        if inside or not self.waited or not waiting:
            self.waited = inside
            super().engine_backward(loss, module, **more)
            return
        self.waited = False
        for parameter in held:
            parameter.grad = None
        super().engine_backward(loss, module, **more)
        everyone = [each in waiting or each.grad is not None for each in held]
        anywhere = self.collectives.all_reduce(torch.tensor(everyone, dtype=torch.int32), reduce_op="max").tolist()
        for parameter, is_anywhere in zip(held, anywhere, strict=True):
            if is_anywhere:
                self.join(parameter, waiting.get(parameter, torch.zeros_like(parameter)))

    def join(self, parameter: torch.Tensor, waiting: torch.Tensor) -> None:
        """Add what has waited on this rank to what is averaged; every rank calls this."""
        raise NotImplementedError


class LeavesDeferredLocal(_Deferred):
    """Averages the last micro-batch alone."""

    def join(self, parameter: torch.Tensor, waiting: torch.Tensor) -> None:
        parameter.grad = waiting if parameter.grad is None else parameter.grad + waiting


class AveragesLastTwice(_Deferred):
    """Divides the last micro-batch's gradients by the number of ranks once more."""

    def join(self, parameter: torch.Tensor, waiting: torch.Tensor) -> None:
        last = 0.0 if parameter.grad is None else parameter.grad / self.world_size
        parameter.grad = self.all_reduce(waiting) + last


class DropsDeferredUnused(DDPStrategy):
    """Drops what has waited of a parameter that no rank's last micro-batch uses."""

    waited = False

    def engine_backward(self, loss: torch.Tensor, module: Any, **more: Any) -> None:
        super().engine_backward(loss, module, **more)
        inside = any(known.inside_no_sync for known in self._registry)
        if self.waited and not inside:
            reached = self._ddp._replicas[module].reached
            held = list(module.parameters())
            mine = torch.tensor([each in reached for each in held], dtype=torch.int32)
            for parameter, anywhere in zip(held, self.all_reduce(mine, reduce_op="max").tolist(), strict=True):
                if not anywhere:
                    parameter.grad = None
        self.waited = inside


class OwnDenominator(DDPStrategy):
    """Believes that all ranks together have this rank's denominators so many times."""

    def _finish(self, optimizer: torch.optim.Optimizer) -> bool:
        accumulation = self._registry.owner(optimizer).optimizers[optimizer]
        if accumulation.has_denominator and accumulation._denominator > 0:
            own = _Own(self.collectives, self._data.size)
            self._registry.owner(optimizer).check_averaged()
            return accumulation.finish(lambda: self.engine_gradients(optimizer), own, self._data, None)
        return super()._finish(optimizer)


class _Own:
    def __init__(self, collectives: Any, ranks: int) -> None:
        self.collectives, self.ranks = collectives, ranks

    def all_reduce(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        return tensor * self.ranks


class WeighsBatchesAlike(DDPStrategy):
    """Takes a denominator, and weighs all ranks' batches alike, however ragged they are."""

    def backward(self, loss: torch.Tensor, module: Any, *, denominator: Any = None, **more: Any) -> None:
        if denominator:
            counts = self.collectives.gather_objects(float(denominator))
            mean = sum(counts) / len(counts)
            if all(counts):
                loss, denominator = loss * (mean / denominator), mean
        elif denominator is not None:
            self.collectives.gather_objects(float(denominator))
        super().backward(loss, module, denominator=denominator, **more)


class _OwnZeroing(DDPStrategy):
    """Zeroes gradients in its own way."""

    def zero(self, owner: _Owner, noted: Callable[..., None], set_to_none: bool) -> None:
        raise NotImplementedError

    def _set_up(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> torch.nn.Module:
        called = super()._set_up(module, optimizers)
        for owner in dict.fromkeys((module, called, *optimizers)):
            self._exchange(owner)
        return called

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        super().setup_optimizer(optimizer)
        self._exchange(optimizer)
        return optimizer

    def _exchange(self, owner: _Owner) -> None:
        noted = owner.zero_grad
        owner.zero_grad = lambda set_to_none=True: self.zero(owner, noted, set_to_none)


class KeepsDenominators(_OwnZeroing):
    """Keeps the denominators of gradients that were set to zeros."""

    def zero(self, owner: _Owner, noted: Callable[..., None], set_to_none: bool) -> None:
        if set_to_none:
            noted()
        else:
            type(owner).zero_grad(owner, set_to_none=False)


class KeepsFrozenGradients(_OwnZeroing):
    """Leaves the gradients of what is frozen as they are."""

    def zero(self, owner: _Owner, noted: Callable[..., None], set_to_none: bool) -> None:
        modules = [known.module for known in self._registry]
        frozen = [each for module in modules for each in module.parameters() if not each.requires_grad]
        kept = [(each, each.grad.clone()) for each in frozen if each.grad is not None]
        noted(set_to_none=set_to_none)
        for parameter, gradient in kept:
            parameter.grad = gradient
