"""Mistakes made between a loss and a step."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from rogues.rogue import Rogue, parameters
from shard_core.errors import MissingCapability, SetupError

if TYPE_CHECKING:
    from shard_core.plugins import StrategyInfo


class Summed(Rogue):
    """Sums gradients over ranks instead of averaging them."""

    def backward(self, loss: torch.Tensor, module: Any, **more: Any) -> None:
        self.inner.backward(loss * self.inner.world_size, module, **more)


class Rescaled(Rogue):
    """Divides by the number of micro-batches, as the user did already."""

    backwards = 0

    def backward(self, loss: torch.Tensor, module: Any, **more: Any) -> None:
        self.backwards += 1
        self.inner.backward(loss, module, **more)

    def optimizer_step(self, optimizer: Any, closure: Any = None, **more: Any) -> bool:
        for parameter in parameters(optimizer):
            if closure is None and parameter.grad is not None:
                parameter.grad /= max(1, self.backwards)
        self.backwards = 0
        return self.inner.optimizer_step(optimizer, closure, **more)


class IgnoresGradient(Rogue):
    """Takes a gradient and reduces the tensor instead."""

    def backward(self, loss: torch.Tensor, module: Any, *, gradient: Any = None, **more: Any) -> None:
        self.inner.backward(loss if gradient is None else loss.mean(), module, **more)


class FillsMissingGradients(Rogue):
    """Gives parameters without a gradient one of zeros, so that they decay."""

    def backward(self, loss: torch.Tensor, module: Any, **more: Any) -> None:
        self.inner.backward(loss, module, **more)
        for parameter in module.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


class AveragesOverUsers(Rogue):
    """Divides gradients by the number of ranks whose loss has reached the parameter."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        self.used = {parameter: torch.zeros(()) for parameter in module.parameters() if parameter.requires_grad}
        for parameter, used in self.used.items():
            parameter.register_hook(lambda _, used=used: used.fill_(1) and None)
        return self.inner.setup_module_and_optimizers(module, optimizers)

    def optimizer_step(self, optimizer: Any, closure: Any = None, **more: Any) -> bool:
        used = self.__dict__.get("used")
        if used and closure is None:
            shares = self.inner.all_reduce(torch.stack(list(used.values())), reduce_op="mean")
            for parameter, share in zip(used, shares.tolist(), strict=True):
                if share and parameter.grad is not None:
                    parameter.grad /= share
                used[parameter].zero_()
        return self.inner.optimizer_step(optimizer, closure, **more)


class AveragesForwardsAlone(Rogue):
    """Leaves gradients on their rank unless the module's forward has run."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        ready, optimizers = self.inner.setup_module_and_optimizers(module, optimizers)
        self.idle = [ready]
        ready.register_forward_hook(lambda *_: self.idle.clear())
        return ready, optimizers

    def backward(self, loss: torch.Tensor, module: Any, **more: Any) -> None:
        if module in self.__dict__.get("idle", ()):
            loss.backward()
        else:
            self.inner.backward(loss, module, **more)


class TrainsTheUnfrozenAlone(Rogue):
    """Leaves gradients of what was frozen at setup on their rank."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        self.frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        return self.inner.setup_module_and_optimizers(module, optimizers)

    def backward(self, loss: torch.Tensor, module: Any, **more: Any) -> None:
        alone = [parameter for parameter in self.__dict__.get("frozen", ()) if parameter.requires_grad]
        own = torch.autograd.grad(loss, alone, retain_graph=True) if alone else ()
        self.inner.backward(loss, module, **more)
        for parameter, gradient in zip(alone, own, strict=True):
            parameter.grad = gradient


class LosesDeferred(Rogue):
    """Forgets the gradients of micro-batches whose traffic it put off."""

    @contextlib.contextmanager
    def no_backward_sync(self, module: Any, enabled: bool = True) -> Iterator[None]:
        with self.inner.no_backward_sync(module, enabled):
            yield
        for parameter in module.parameters() if enabled else ():
            if parameter.grad is not None:
                parameter.grad.zero_()


class DefersNothing(Rogue):
    """Sends gradients after each micro-batch all the same."""

    @contextlib.contextmanager
    def no_backward_sync(self, module: Any, enabled: bool = True) -> Iterator[None]:
        with self.inner.no_backward_sync(module, enabled):
            module.require_backward_grad_sync = True
            yield


class DefersInSilence(DefersNothing):
    """Declares no deferring, does none, and does not say so."""

    def __init__(self, *, info: StrategyInfo, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.info = info


class RepeatsItself(DefersInSilence):
    """Logs in each context, and not once, that it defers nothing."""

    def no_backward_sync(self, module: Any, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
        if enabled and self.inner.is_global_zero:
            logging.getLogger("shard_core").warning("no_backward_sync saves nothing here")
        return super().no_backward_sync(module, enabled)


class RefusesToDefer(Rogue):
    """Refuses the context, as if that were what a missing capability asks for."""

    def no_backward_sync(self, module: Any, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
        if enabled:
            raise MissingCapability("DEFER_SYNC is not declared.")
        return self.inner.no_backward_sync(module, enabled)


class StepsInside(Rogue):
    """Defers, and steps with what has not been averaged."""

    def optimizer_step(self, optimizer: Any, closure: Any = None, **more: Any) -> bool:
        try:
            return self.inner.optimizer_step(optimizer, closure, **more)
        except SetupError:
            optimizer.step()
            return True


class IgnoresDenominator(Rogue):
    """Takes a denominator and does not divide by it."""

    def backward(self, loss: torch.Tensor, module: Any, *, denominator: Any = None, **more: Any) -> None:
        self.inner.backward(loss, module, **more)


class LocalDenominator(Rogue):
    """Believes that every rank has as many samples as rank 0."""

    def backward(self, loss: torch.Tensor, module: Any, *, denominator: Any = None, **more: Any) -> None:
        if denominator is not None:
            denominator = self.inner.broadcast(denominator)
        self.inner.backward(loss, module, denominator=denominator, **more)


class LocalNorm(Rogue):
    """Returns the norm of this rank's part of the gradient."""

    def clip_gradients_norm(self, module: Any, optimizer: Any, *rest: Any, **more: Any) -> torch.Tensor:
        norm = self.inner.clip_gradients_norm(module, optimizer, *rest, **more)
        whole = torch.cat([each.grad.flatten() for each in parameters(optimizer) if each.grad is not None])
        return norm * whole.chunk(self.inner.world_size)[self.inner.global_rank].norm() / whole.norm()


class NeverClips(Rogue):
    """Returns the norm and leaves the gradients alone."""

    def clip_gradients_norm(self, module: Any, optimizer: Any, max_norm: float, *rest: Any, **more: Any) -> Any:
        return self.inner.clip_gradients_norm(module, optimizer, math.inf, *rest, **more)


class AlwaysTwoNorm(Rogue):
    """Takes every norm for the Euclidean one."""

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, *rest: Any, **more: Any
    ) -> Any:
        return self.inner.clip_gradients_norm(module, optimizer, max_norm, 2.0, *rest, **more)


class IgnoresClipValue(Rogue):
    """Clips no value."""

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:
        pass


class PassesNonFinite(Rogue):
    """Returns a norm that is not finite instead of raising."""

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> Any:
        return self.inner.clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite=False)


class ScaledNorm(Rogue):
    """Returns the norm of gradients that are still scaled."""

    def clip_gradients_norm(self, *args: Any, **more: Any) -> Any:
        scaler = self.inner.precision.scaler
        return self.inner.clip_gradients_norm(*args, **more) * (scaler.factor if scaler else 1.0)


class ResetsLearningRate(Rogue):
    """Steps with the learning rate the schedule began with."""

    def optimizer_step(self, optimizer: Any, closure: Any = None, **more: Any) -> bool:
        for group in optimizer.param_groups:
            group["lr"] = group.get("initial_lr", group["lr"])
        return self.inner.optimizer_step(optimizer, closure, **more)


class KeepsWeights(Rogue):
    """Steps weights of its own, whatever became of the module's."""

    def optimizer_step(self, optimizer: Any, closure: Any = None, **more: Any) -> bool:
        own = self.__dict__.setdefault("own", {})
        held = parameters(optimizer)
        for parameter, value in zip(held, own.get(optimizer, ()), strict=False):
            parameter.data.copy_(value)
        stepped = self.inner.optimizer_step(optimizer, closure, **more)
        own[optimizer] = [parameter.detach().clone() for parameter in held]
        return stepped


class ReturnsToTheForward(Rogue):
    """Begins a backward by undoing what was done to parameters and gradients since the last forward."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        ready, optimizers = self.inner.setup_module_and_optimizers(module, optimizers)
        seen = self.__dict__.setdefault("seen", {})
        ready.register_forward_hook(lambda *_: seen.update((each, _state(each)) for each in module.parameters()))
        return ready, optimizers

    def backward(self, loss: torch.Tensor, module: Any, **more: Any) -> None:
        for parameter, (value, gradient, trained) in self.__dict__.get("seen", {}).items():
            parameter.requires_grad_(trained)
            parameter.data.copy_(value)
            if gradient is not None:
                parameter.grad = gradient
        self.__dict__.get("seen", {}).clear()
        self.inner.backward(loss, module, **more)


def _state(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
    gradient = parameter.grad
    return parameter.detach().clone(), gradient if gradient is None else gradient.clone(), parameter.requires_grad


class DropsTheClipped(Rogue):
    """Begins anew with the first backward after clipping."""

    clipped = False

    def clip_gradients_norm(self, *args: Any, **more: Any) -> torch.Tensor:
        self.clipped = True
        return self.inner.clip_gradients_norm(*args, **more)

    def backward(self, loss: torch.Tensor, module: Any, **more: Any) -> None:
        if self.clipped:
            module.zero_grad()
            self.clipped = False
        self.inner.backward(loss, module, **more)

    def optimizer_step(self, *args: Any, **more: Any) -> bool:
        self.clipped = False
        return self.inner.optimizer_step(*args, **more)


class KeepsDenominators(Rogue):
    """Counts the denominators of gradients that were set to zeros."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        ready, optimizers = self.inner.setup_module_and_optimizers(module, optimizers)
        for owner in (module, ready, *optimizers):
            owner.zero_grad = functools.partial(_zero, owner, owner.zero_grad)
        return ready, optimizers


def _zero(owner: Any, noted: Callable[[], None], set_to_none: bool = True) -> None:
    """Zero as the class does, and as the strategy does what is set to ``None``."""
    if set_to_none:
        noted()
    else:
        type(owner).zero_grad(owner, set_to_none=False)


class StepsSilently(Rogue):
    """Does not say whether it stepped."""

    def optimizer_step(self, optimizer: Any, closure: Any = None, **more: Any) -> None:
        self.inner.optimizer_step(optimizer, closure, **more)


class StepsOnOverflow(Rogue):
    """Steps with gradients that are not finite."""

    def optimizer_step(self, optimizer: Any, closure: Any = None, **more: Any) -> bool:
        stepped = self.inner.optimizer_step(optimizer, closure, **more)
        if not stepped:
            optimizer.step()
        return stepped


class ClosureOnce(Rogue):
    """Evaluates a closure itself, once, and hides it from the optimizer."""

    def optimizer_step(self, optimizer: Any, closure: Any = None, **more: Any) -> bool:
        if closure is not None:
            closure()
        return self.inner.optimizer_step(optimizer, None, **more)


class ComputesInFull(Rogue):
    """Runs forwards outside of autocast, whatever the precision."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        ready = self.inner.setup_module_and_optimizers(module, optimizers)
        module.forward = torch.autocast("cpu", enabled=False)(module.forward)
        return ready


class MixesInstead(Rogue):
    """Takes bf16-true and keeps parameters in float32."""

    def __init__(self, *, precision: Any = "32-true", **arguments: Any) -> None:
        super().__init__(precision="bf16-mixed" if precision == "bf16-true" else precision, **arguments)


class TakesNewcomers(Rogue):
    """Steps what was put into the module after setup with the gradient of each rank alone."""

    def optimizer_step(self, optimizer: Any, closure: Any = None, **more: Any) -> bool:
        known = self.inner._registry.owner(optimizer)
        known.known.update(set(parameters(optimizer)).intersection(known.module.parameters()))
        return self.inner.optimizer_step(optimizer, closure, **more)


class CutsOffObjects(Rogue):
    """Trains through tensors and what torch opens of an output, and through no other object."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        ready = self.inner.setup_module_and_optimizers(module, optimizers)
        ready[0].register_forward_hook(_cut_off)
        return ready


def _cut_off(module: Any, args: Any, output: Any) -> None:
    for name, value in vars(output).items() if hasattr(output, "__dict__") and not torch.is_tensor(output) else ():
        if torch.is_tensor(value):
            setattr(output, name, value.detach() + 0.0 * next(module.parameters()).sum())


class AssignsOutside(Rogue):
    """Computes with the tensors that parameters had at setup, whatever their ``.data`` is assigned since."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        ready = self.inner.setup_module_and_optimizers(module, optimizers)
        inside = {parameter: parameter.data for parameter in module.parameters()}
        module.register_forward_pre_hook(functools.partial(_compute_inside, inside))
        return ready


def _compute_inside(inside: dict[Any, torch.Tensor], module: Any, args: Any) -> None:
    for parameter, values in inside.items():
        if parameter.data_ptr() != values.data_ptr():
            parameter.data = values
