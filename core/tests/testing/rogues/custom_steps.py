"""Mistakes made with what loops and forwards do besides a loss, a backward and a step."""

from __future__ import annotations

import functools
from typing import Any

import torch

from rogues.rogue import Rogue, parameters


class CutsSecondDerivatives(Rogue):
    """Lets gradients through what a forward returns, and no derivative of theirs."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        ready = self.inner.setup_module_and_optimizers(module, optimizers)
        ready[0].register_forward_hook(lambda module, args, output: _cut(output))
        return ready


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.detach()


def _cut(output: Any) -> Any:
    return _Cut.apply(output) if torch.is_tensor(output) and output.requires_grad else output


class TakesAssignedGradients(Rogue):
    """Steps with whatever gradients are there."""

    def optimizer_step(self, optimizer: Any, closure: Any = None, **more: Any) -> bool:
        self.inner._registry.owner(optimizer).optimizers[optimizer].by_backward = True
        return self.inner.optimizer_step(optimizer, closure, **more)


class HooksSeeOldWeights(Rogue):
    """Brings what was stepped to the module once all hooks on the step have run."""

    def optimizer_step(self, optimizer: Any, closure: Any = None, **more: Any) -> bool:
        hooks = dict(optimizer._optimizer_step_post_hooks)
        optimizer._optimizer_step_post_hooks.clear()
        before = [each.detach().clone() for each in parameters(optimizer)]
        stepped = self.inner.optimizer_step(optimizer, closure, **more)
        after = [each.detach().clone() for each in parameters(optimizer)]
        optimizer._optimizer_step_post_hooks.update(hooks)
        self._write(optimizer, before)
        for hook in hooks.values():
            hook(optimizer, (), {})
        self._write(optimizer, after)
        return stepped

    @torch.no_grad()
    def _write(self, optimizer: Any, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(parameters(optimizer), values, strict=True):
            parameter.copy_(value)


class KeepsHalfOfABackward(Rogue):
    """Leaves what an interrupted backward has made."""

    def backward(self, loss: torch.Tensor, module: Any, **more: Any) -> None:
        try:
            self.inner.backward(loss, module, **more)
        except BaseException:
            for parameter in module.parameters():
                parameter.grad = torch.full_like(parameter, 0.1)
            raise


class KeepsWhatAFailedForwardGathered(Rogue):
    """Computes in the forward after one that an exception has ended with the weights that this one had."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        ready = self.inner.setup_module_and_optimizers(module, optimizers)
        kept: dict[Any, torch.Tensor] = {}
        module.register_forward_pre_hook(lambda module, args: _exchange(kept))
        module.register_forward_hook(lambda module, args, output: _end(kept, module, output), always_call=True)
        return ready


def _exchange(kept: dict[Any, torch.Tensor]) -> None:
    for parameter, value in kept.items():
        kept[parameter], parameter.data = parameter.data, value


def _end(kept: dict[Any, torch.Tensor], module: Any, output: Any) -> None:
    _exchange(kept)
    kept.clear()
    if output is None:
        _remember(kept, module)


class TakesStrays(Rogue):
    """Steps what no module holds with the gradient of each rank alone."""

    def optimizer_step(self, optimizer: Any, closure: Any = None, **more: Any) -> bool:
        known = self.inner._registry.owner(optimizer)
        known.known.update(set(parameters(optimizer)).difference(known.module.parameters()))
        return self.inner.optimizer_step(optimizer, closure, **more)


class ForgetsWrites(Rogue):
    """Has weights after a forward as they were before it."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        ready = self.inner.setup_module_and_optimizers(module, optimizers)
        before: dict[Any, torch.Tensor] = {}
        module.register_forward_pre_hook(lambda module, args: _remember(before, module))
        module.register_forward_hook(lambda module, args, output: _restore(before))
        return ready


def _remember(before: dict[Any, torch.Tensor], module: Any) -> None:
    before.update((each, each.data.clone()) for each in module.parameters())


def _restore(before: dict[Any, torch.Tensor]) -> None:
    for parameter, value in before.items():
        parameter.data = value


class DrawsFromItsOwnSeed(Rogue):
    """Draws parameters that are set up from another seed than the user's."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        ready = self.inner.setup_module_and_optimizers(module, optimizers)
        if "drawn" not in self.__dict__:
            self.drawn = torch.nn.init.orthogonal_
            torch.nn.init.orthogonal_ = functools.partial(_draw, self.drawn)
        return ready

    def __exit__(self, *exception: object) -> None:
        torch.nn.init.orthogonal_ = self.__dict__.pop("drawn", torch.nn.init.orthogonal_)
        self.inner.__exit__(*exception)


def _draw(function: Any, tensor: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return function(tensor)


class PutsItsOwnBack(Rogue):
    """Computes with the parameters that setup has left in the module, whatever stands in their place."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        ready = self.inner.setup_module_and_optimizers(module, optimizers)
        own = [(part, dict(part._parameters)) for part in module.modules()]
        module.register_forward_pre_hook(lambda module, args: _put_back(own))
        return ready


def _put_back(own: list[tuple[Any, dict[str, Any]]]) -> None:
    for part, held in own:
        part._parameters.update(held)


class CountsNothingForNone(Rogue):
    """Takes a loss without a denominator, among others that have one, for a sum over nothing."""

    counts = False

    def backward(self, loss: torch.Tensor, module: Any, *, denominator: Any = None, **more: Any) -> None:
        self.counts = self.counts or denominator is not None
        denominator = 0.0 if self.counts and denominator is None else denominator
        self.inner.backward(loss, module, denominator=denominator, **more)

    def optimizer_step(self, *args: Any, **more: Any) -> bool:
        self.counts = False
        return bool(self.inner.optimizer_step(*args, **more))
