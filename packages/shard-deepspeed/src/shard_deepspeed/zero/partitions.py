"""How each ZeRO stage lays a module's trained parameters out, and what its backward and its step leave where."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shard_core.backend import FlatPart
from shard_deepspeed import _versions
from shard_deepspeed.zero.stepped_values import SteppedValues

if TYPE_CHECKING:
    from shard_deepspeed.zero.trained_parameter import TrainedParameter


class Partitions(abc.ABC):
    """One stage's layout.

    Order of calls: ``part`` of each parameter once; then ``make_ready``, a backward, ``reduce`` and ``collect``;
    ``publish`` once parts have been stepped or loaded.

    Args:
        engine: DeepSpeed's.
        rank: This rank.

    Attributes:
        lets_go: Whether a forward or backward may let go of values that are whole in the module.
        sends_last: Whether gradients are sent after a backward, in the order of parameters.
        spreads: Whether a part is not all of its parameter.
    """

    spreads = True
    lets_go = False
    sends_last = False

    def __init__(self, engine: Any, rank: int) -> None:
        self._engine = engine
        self._zero = engine.optimizer
        self._rank = rank

    @abc.abstractmethod
    def part(self, parameter: torch.nn.Parameter) -> FlatPart:
        """Return which run of a parameter this rank steps; its values share the engine's memory."""

    def strayed(self) -> bool:
        """Return whether the module's own values on this rank differ from the parts', rounded to their dtype."""
        return False

    def moved(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter was given other data since, which its part does not share."""
        del parameter
        return False

    def shares(self, parameter: torch.Tensor) -> bool:
        """Return whether parts of a parameter, on whichever rank, stand in the memory of its place in the module."""
        del parameter
        return not self.spreads

    def beside(self, parameter: torch.Tensor, part: FlatPart, strayed: bool) -> torch.Tensor | None:
        """Return the module's own values that a part may have to take; None where it has no others.

        Args:
            parameter: The module's.
            part: What of it this rank holds.
            strayed: What the method of that name returned.
        """
        del parameter, part, strayed
        return None

    def make_ready(self, trained: Iterable[TrainedParameter]) -> None:
        """Prepare a backward whose gradients are to add to those the parts have."""
        del trained

    def reduce(self, trained: Iterable[TrainedParameter]) -> None:
        """Average, over all ranks, what a backward has left, and with it what deferred ones have."""
        del trained
        self._engine.allreduce_gradients()
        if hasattr(self._zero, "backward_epilogue"):
            self._zero.backward_epilogue()

    def forget(self) -> None:
        """Forget what a backward that did not end was about to send."""
        _versions.forget_backward(self._zero)

    @abc.abstractmethod
    def collect(self, averaged: Sequence[TrainedParameter]) -> None:
        """Add the gradients that were averaged to those of the parts."""

    @abc.abstractmethod
    def publish(self) -> None:
        """Copy the parts' values to all ranks' parameters."""


class Whole(Partitions):
    """Stage 0: every rank has and steps all of every parameter."""

    spreads = False
    sends_last = True

    def part(self, parameter: torch.nn.Parameter) -> FlatPart:
        """Step the parameter itself."""
        return FlatPart(shape=tuple(parameter.shape), start=0, values=parameter)

    def reduce(self, trained: Iterable[TrainedParameter]) -> None:
        """Average gradients; those nobody has made are made up of zeros on the way, and go again."""
        parameters = [each.parameter for each in trained]
        without = [each for each in parameters if each.grad is None]
        # DeepSpeed passes over these, and what deferred backwards have left with them.
        frozen = [each for each in parameters if not each.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            super().reduce(trained)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        for parameter in without:
            parameter.grad = None

    def forget(self) -> None:
        """Do nothing: nothing is sent before a backward has ended."""

    def collect(self, averaged: Sequence[TrainedParameter]) -> None:
        """Keep gradients where they are."""

    def publish(self) -> None:
        """Do nothing."""


class Flat(Partitions):
    """What stages 1 to 3 have in common: values on this rank stand in flat tensors, stepped in float32."""

    def __init__(self, engine: Any, rank: int) -> None:
        super().__init__(engine, rank)
        _versions.step_float32_in_place(self._zero, rank)

    def strayed(self) -> bool:
        """Compare whole flat tensors, unless they are the same."""
        return any(
            stepped.dtype != own.dtype and not torch.equal(stepped.to(own.dtype), own)
            for stepped, own in _versions.stepped_and_own(self._zero, self._rank)
        )


class Runs(Flat):
    """Stages 1 and 2: all parameters stand in one flat tensor, of which each rank steps a run."""

    def __init__(self, engine: Any, rank: int) -> None:
        super().__init__(engine, rank)
        self._places: dict[int, torch.Tensor] = {}
        self.sends_last = not (self._zero.overlap_comm or self._zero.partition_gradients)

    def part(self, parameter: torch.nn.Parameter) -> FlatPart:
        """Find the parameter's part of this rank's run."""
        self._places[id(parameter)] = parameter.data
        values, start = _versions.float32_run(parameter)
        return FlatPart(
            shape=tuple(parameter.shape),
            start=start,
            values=SteppedValues(values),
            alias=_alias(parameter, values),
        )

    def moved(self, parameter: torch.Tensor) -> bool:
        """Return whether the parameter is not in its place."""
        return parameter.data_ptr() != self._places[id(parameter)].data_ptr()

    def shares(self, parameter: torch.Tensor) -> bool:
        """Return whether the place is in the dtype that is stepped."""
        return self._places[id(parameter)].dtype == torch.float32

    def beside(self, parameter: torch.Tensor, part: FlatPart, strayed: bool) -> torch.Tensor | None:
        """Return the parameter's run of the flat tensor, back in its place, unless it is the part."""
        place, moved = self._places[id(parameter)], self.moved(parameter)
        if moved:
            place.copy_(parameter)
            parameter.data = place
        if place.dtype == part.values.dtype or not (moved or strayed):
            return None
        return place.view(-1)[part.start : part.start + part.values.numel()]

    def reduce(self, trained: Iterable[TrainedParameter]) -> None:
        """Average gradients, and with them those that only deferred backwards have made."""
        if self._zero.overlap_comm:
            for each in trained:
                if each.waits and not each.passed:
                    _versions.reduce_late(self._zero, each.parameter)
        super().reduce(trained)

    def collect(self, averaged: Sequence[TrainedParameter]) -> None:
        """Collect the tensors that DeepSpeed makes anew for every backward."""
        gradients = {id(p): gradient for p, gradient in _versions.take_averaged_gradients(self._zero)}
        for each in averaged:
            gradient = gradients.get(id(each.parameter))
            values = each.part.values
            flat = torch.zeros_like(values) if gradient is None else gradient.detach().reshape(-1).to(values.dtype)
            values.grad = flat if values.grad is None else values.grad.add_(flat)

    def publish(self) -> None:
        """Cast and gather."""
        _versions.publish_runs(self._zero)


class Shards(Flat):
    """Stage 3: each parameter is split into equal shards, the last of them padded."""

    lets_go = True

    def __init__(self, engine: Any, rank: int) -> None:
        super().__init__(engine, rank)
        self._gradients: dict[int, torch.Tensor] = {}
        _versions.gather_persistent(self._zero)

    def part(self, parameter: torch.nn.Parameter) -> FlatPart:
        """Find this rank's shard and the memory of its gradient."""
        shard = _versions.float32_shard(parameter)
        part = shard_part(parameter, shard, self._rank)
        alias = _alias(_versions.shard_of(parameter), shard)
        part = dataclasses.replace(part, values=SteppedValues(part.values), alias=alias)
        self._gradients[id(parameter)] = _versions.gradient_shard(parameter)[: part.values.numel()]
        return part

    def beside(self, parameter: torch.Tensor, part: FlatPart, strayed: bool) -> torch.Tensor | None:
        """Return the run of a parameter that is whole just now, or its shard, unless that is the part."""
        shard = _versions.stored_shard(parameter)
        assert shard is not None
        rounded = shard.dtype != part.values.dtype
        if _versions.is_away(parameter):
            return shard[: part.values.numel()] if rounded and strayed else None
        own = parameter.reshape(-1).narrow(0, part.start, part.values.numel())
        if rounded:  # what is gathered next; else it is the part
            shard[: part.values.numel()].copy_(own)
        return own

    def make_ready(self, trained: Iterable[TrainedParameter]) -> None:
        """Put in place what is to be added to: DeepSpeed adds gradients up in one."""
        _versions.gather_persistent(self._zero)
        _versions.add_up(self._zero)
        for each in trained:
            place, gradient = self._gradients[id(each.parameter)], each.part.values.grad
            if gradient is None:
                place.zero_()
            elif gradient.data_ptr() != place.data_ptr():  # another one, or one that was given other data
                place.copy_(gradient)

    def collect(self, averaged: Sequence[TrainedParameter]) -> None:
        """Show the place where gradients add up, in a tensor that may be given other data."""
        for each in averaged:
            each.part.values.grad = self._gradients[id(each.parameter)].detach()

    def publish(self) -> None:
        """Gather what stays whole between steps."""
        _versions.publish_shards(self._zero)


def shard_part(parameter: torch.Tensor, shard: torch.Tensor, rank: int) -> FlatPart:
    """Return which run of a parameter a rank's padded shard of it is."""
    shape = _versions.full_shape(parameter)
    numel = torch.Size(shape).numel()
    start = min(rank * shard.numel(), numel)
    return FlatPart(shape=shape, start=start, values=shard[: min(shard.numel(), numel - start)])


def _alias(tensor: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor if what is stepped stands in its memory; a float32 copy of what computes has its own."""
    if tensor is None or tensor.untyped_storage().data_ptr() != values.untyped_storage().data_ptr():
        return None
    return tensor


def partitions(engine: Any, rank: int) -> Partitions:
    """Choose the layout of an engine's stage."""
    kinds: dict[int, type[Partitions]] = {0: Whole, 1: Runs, 2: Runs, 3: Shards}
    return kinds[int(engine.zero_optimization_stage())](engine, rank)
