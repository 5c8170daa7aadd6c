"""Mistakes about gradients, about state at more than one moment, and of more than one parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from rogues.rogue import Rogue, parameters
from shard_core.backend import FlatPart


class KeepsItsFirstLook(Rogue):
    """Hands one parameter's second moment out of its first state dict again in all later ones."""

    def optimizer_state_dict(self, optimizer: Any, full: bool = True) -> Any:
        with _first_moment_seen(self.__dict__.setdefault("looked", {}), optimizer):
            return self.inner.optimizer_state_dict(optimizer, full)


class HandsOutWhatTrains(Rogue):
    """Returns the parameters themselves, and no copies, where they are whole."""

    def module_state_dict(self, module: Any, full: bool = True) -> Any:
        copies = self.inner.module_state_dict(module, full)
        return {name: each for name, each in self.inner.unwrap(module).state_dict().items() if name in copies}


class ShowsSums(Rogue):
    """Shows gradients summed over ranks, and not averaged."""

    def module_gradients(self, module: Any, full: bool = True) -> Any:
        shown = self.inner.module_gradients(module, full)
        return {name: gradient * self.inner.world_size for name, gradient in shown.items()}


class AveragesCopies(Rogue):
    """Hands averages copies of the weights, made when it is asked."""

    def engine_flat_parts(self, module: Any) -> dict[torch.Tensor, FlatPart]:
        return {
            each: FlatPart(shape=tuple(each.shape), start=0, values=each.detach().flatten().clone())
            for each in module.parameters()
        }


class SavesItsFirstSave(Rogue):
    """Writes one parameter's second moment of its first save into all later ones."""

    def save_checkpoint(self, path: Any, state: Any, **more: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for optimizer in _optimizers(state):
                stack.enter_context(_first_moment_seen(self.__dict__.setdefault("saved", {}), optimizer))
            return self.inner.save_checkpoint(path, state, **more)


class CountsStepsTogether(Rogue):
    """Returns and saves one count of steps for all parameters."""

    def optimizer_state_dict(self, optimizer: Any, full: bool = True) -> Any:
        with _largest_count(optimizer):
            return self.inner.optimizer_state_dict(optimizer, full)

    def save_checkpoint(self, path: Any, state: Any, **more: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for optimizer in _optimizers(state):
                stack.enter_context(_largest_count(optimizer))
            return self.inner.save_checkpoint(path, state, **more)


def _optimizers(state: dict[str, Any]) -> list[torch.optim.Optimizer]:
    return [each for each in state.values() if isinstance(each, torch.optim.Optimizer)]


@contextlib.contextmanager
def _first_moment_seen(seen: dict[int, torch.Tensor], optimizer: Any) -> Iterator[None]:
    """Restore, for a while, what the first parameter's second moment was when this was first asked."""
    slots = optimizer.state.get(parameters(optimizer)[0], {})
    moment = slots.get("exp_avg_sq")
    if moment is not None:
        slots["exp_avg_sq"] = seen.setdefault(id(optimizer), moment.clone())
    try:
        yield
    finally:
        if moment is not None:
            slots["exp_avg_sq"] = moment


@contextlib.contextmanager
def _largest_count(optimizer: Any) -> Iterator[None]:
    counts = {parameter: slots["step"] for parameter, slots in optimizer.state.items() if "step" in slots}
    for parameter in counts:
        optimizer.state[parameter]["step"] = max(counts.values()).clone()
    try:
        yield
    finally:
        for parameter, count in counts.items():
            optimizer.state[parameter]["step"] = count
