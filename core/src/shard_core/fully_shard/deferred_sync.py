"""Deferred gradients wait for a later micro-batch: their units must run in it, or they would be lost."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shard_core._versions import (
    at_backward_end,
    deferred_shards,
    drop_deferred_gradients,
    gathered_for,
    reduce_gradients,
    running_backward,
    version_of,
)
from shard_core.errors import SetupError
from shard_core.fully_shard.units import sharded_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.fsdp import FSDPModule

    from shard_core.collectives.interface import Collectives
    from shard_core.fully_shard.units import Unit


class DeferredSync:
    """Notices deferred gradients that the micro-batch which reduces them would lose or mix up.

    Torch sends what a unit has deferred when its next backward sends something; a unit that is left out there sends
    nothing, and its gradient would be lost without a word. Until then it adds gradients up as one row, of those
    parameters that a micro-batch has reached, so others in their place would be added to them.

    Args:
        module: A module that was sharded.
        units: Its units, without the root's.
        collectives: Of all ranks, which refuse together.
        in_parts: The first modules of units of which some part was called on its own. Torch reduces such a unit once
            for each of its parts, and would add what waits of one to what waits of another.

    Attributes:
        deferred: Whether the reduction of gradients is deferred just now.
    """

    def __init__(
        self, module: nn.Module, units: Sequence[Unit], collectives: Collectives, in_parts: Collection[nn.Module]
    ) -> None:
        self.deferred = False
        self._collectives = collectives
        self._in_parts = in_parts
        self._groups = [_Group(repr(unit.names[0]), unit.modules[0]) for unit in units]
        self._groups.append(_Group("the root unit", module))

    def begin_backward(self) -> None:
        """Begin to note what a backward reaches, and hold what units would reduce in parts."""
        for group in self._groups:
            group.watch()
            group.hold(group.unit in self._in_parts and (self.deferred or bool(group.pending)), self.deferred)

    def reduce(self) -> None:
        """Reduce what was held, once, as a backward ends."""
        for group in self._groups:
            if group.holds:
                group.hold(False, self.deferred)
                reduce_gradients(group.unit)

    def forget(self) -> None:
        """Forget what is deferred, which was thrown away."""
        for group in self._groups:
            group.pending.clear()

    def end_backward(self, *, named: bool) -> None:
        """Check, after a backward, that no deferred gradient was left out or added to another.

        Args:
            named: Whether the backward was the module's own.

        Raises:
            SetupError: If it was.
        """
        mine = [refusal for group in self._groups if (refusal := group.refusal(self.deferred, named)) is not None]
        if self._collectives.any_true(bool(mine)):  # the losses of some ranks may have reached what others' have not
            refusals = [each for rank in self._collectives.gather_objects(mine) for each in rank]
            self.forget()
            raise SetupError(f"{refusals[0]}; pass defer_sync='all', or leave no_backward_sync out.")


class _Group:
    """The parameters of one unit, which torch sends as one message.

    Attributes:
        unit: The first of its modules.
        pending: Those whose gradients are deferred.
        holds: Whether a backward leaves its gradients whole on their rank.
    """

    def __init__(self, name: str, unit: nn.Module) -> None:
        self.unit = unit
        self.pending: set[torch.Tensor] = set()
        self.holds = False
        self._name = name
        self._watched: set[torch.Tensor] = set()
        self._reached: set[torch.Tensor] = set()

    def watch(self) -> None:
        """Begin to note which parameters get gradients; torch makes what computes when it is first gathered."""
        self._reached.clear()
        for parameter in gathered_for(self.unit):
            if parameter not in self._watched and parameter.requires_grad:
                # Garbage collection does not see what such a hook holds: with the unit, it would hold the whole model.
                parameter.register_post_accumulate_grad_hook(functools.partial(_note, weakref.ref(self)))
                self._watched.add(parameter)

    def hold(self, holds: bool, deferred: bool) -> None:
        """Have backwards leave the unit's gradients whole on their rank, or reduce them again, among all copies or not.

        Args:
            holds: Whether they are left.
            deferred: Whether copies keep to themselves what they have reduced.
        """
        if holds != self.holds:
            self.holds = holds
            unit = cast("FSDPModule", self.unit)
            unit.set_requires_gradient_sync(not holds, recurse=False)  # which sets the other, too
            unit.set_requires_all_reduce(not deferred, recurse=False)

    def note(self, parameter: torch.Tensor) -> None:
        """Note that a parameter was given a gradient."""
        if parameter.requires_grad:  # torch calls hooks of what was frozen after its forward, too
            self._reached.add(parameter)

    def refusal(self, deferred: bool, named: bool) -> str | None:
        """Return why a backward has gone wrong, if it has, and note what it has deferred or sent."""
        if self.pending and self._reached and self._reached != self.pending:
            return (
                f"micro-batches of one step reached different parameters of {self._name}, and between copies torch "
                "adds up deferred gradients by their places"
            )
        if self.pending and named and not deferred and not self._reached:
            return (
                f"{self._name} ran in a micro-batch whose gradients were deferred, but not in the last one, which "
                "sends them"
            )
        if self._reached:
            self.pending = set(self._reached) if deferred else set()
        return None


class PlainBackward:
    """Follows ``loss.backward()``, of whose begin only a hook of what forwards have returned tells.

    What it mixes up of deferred gradients is refused as it ends; what it defers itself waits as if the strategy had.

    Args:
        syncs: What notices deferred gradients that are mixed up, by module.
        gradients: What follows deferred gradients, by module.
        deferring: The modules that defer theirs just now.
        drop_discarded: Called at its begin.

    Attributes:
        running: Autograd's number of the one that has begun and not ended; an exception may have ended it since.
    """

    def __init__(
        self,
        syncs: Mapping[nn.Module, DeferredSync],
        gradients: Mapping[nn.Module, DeferredGradients],
        deferring: Collection[nn.Module],
        drop_discarded: Callable[[], None],
    ) -> None:
        self.running: int | None = None
        self._syncs, self._gradients, self._deferring = syncs, gradients, deferring
        self._drop_discarded = drop_discarded
        self._told: weakref.WeakKeyDictionary[nn.Module, list[Callable[[], object]]] = weakref.WeakKeyDictionary()

    def tell(self, parameter: torch.Tensor, called: Callable[[], object]) -> None:
        """Have a function called where one begins whose gradients are deferred: autograd's hooks come as they are sent.

        Args:
            parameter: Of the module that defers them.
            called: What is called.
        """
        for module in self._gradients:
            if any(each is parameter for each in module.parameters()):
                self._told.setdefault(module, []).append(called)

    def begin(self) -> None:
        """Begin, once for all modules that the loss has come through."""
        if self.running == running_backward():
            return
        self.running = running_backward()
        for sync in self._syncs.values():
            at_backward_end(sync.reduce, first=True)
        at_backward_end(self._end)
        for module in self._deferring:
            for called in self._told.get(module, ()):
                called()
        self._drop_discarded()
        for sync in self._syncs.values():
            sync.begin_backward()

    def _end(self) -> None:
        for sync in self._syncs.values():
            sync.end_backward(named=False)
        self.running = None
        for module in self._deferring:
            gradients = self._gradients[module]
            if not gradients.wait and any(map(deferred_shards, sharded_parts(module))):
                gradients.show()

    def check_ended(self) -> None:
        """Check that no exception has ended the last one, whose gradients a step would be taken with.

        Raises:
            SetupError: If one has.
        """
        if self.running is not None:
            raise SetupError(
                "an exception has ended loss.backward(), whose gradients are not all there; call zero_grad() and begin "
                "the step anew."
            )


def _note(group: weakref.ref[_Group], parameter: torch.Tensor) -> None:
    """Record that a parameter was given a gradient, if what follows its unit is still there."""
    here = group()
    if here is not None:
        here.note(parameter)


class _Shown(NamedTuple):
    """What ``.grad`` of a parameter is while further gradients wait elsewhere.

    Attributes:
        gradient: The tensor.
        changes: How often it was changed.
        zeros: Whether it is there for show.
    """

    gradient: torch.Tensor | None
    changes: tuple[int | None, ...]
    zeros: bool


class DeferredGradients:
    """Follows deferred gradients, which wait where torch keeps them and not in ``.grad``.

    From one micro-batch to the next zeros stand in ``.grad`` in their place, or what earlier micro-batches have sent.
    Where users set these to None, what waits is thrown away with them; any other change would not reach it.

    Args:
        parameters: The shards of a module's parameters, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._shown: dict[str, _Shown] = {}
        self._hidden: dict[str, _Shown] = {}

    @property
    def wait(self) -> bool:
        """Whether some wait just now."""
        return bool(self._shown)

    def show(self) -> None:
        """Record what ``.grad`` is after a backward has deferred gradients, zeros where it would be nothing."""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                zeros = parameter.grad is None
                if zeros:
                    parameter.grad = torch.zeros_like(parameter)
                self._shown[name] = _Shown(parameter.grad, _changes(parameter.grad), zeros)

    def forget_sent(self, module: nn.Module) -> bool:
        """Forget what waits no longer: a backward past the strategy, as of ``torch.autograd.grad``, has sent it.

        Args:
            module: The one whose parameters these are.

        Returns:
            Whether that is all that has changed.
        """
        waiting = set(itertools.chain.from_iterable(map(deferred_shards, sharded_parts(module))))
        for name, shown in list(self._shown.items()):
            parameter = self._parameters[name]
            if parameter in waiting or parameter.grad is not shown.gradient:  # torch adds what it sends in place
                continue
            if shown.zeros and self._is_shown(name, shown):
                parameter.grad = None  # nothing has waited
            del self._shown[name]
        return not self.touched

    def show_again(self, module: nn.Module) -> bool:
        """Show what a backward has left waiting, since its loss came through other modules.

        Args:
            module: The one whose parameters these are.

        Returns:
            Whether something waited before and does so no longer.
        """
        hidden, self._hidden = self._hidden, {}
        left = all(self._is_left(name, shown) for name, shown in hidden.items())
        # Of a module that no loss has reached in any micro-batch nothing waits, however often zeros were shown.
        if hidden and left and any(map(deferred_shards, sharded_parts(module))):
            self.show()
        return not left

    def used(self) -> list[tuple[str, bool]]:
        """List the parameters by name, and whether each has a gradient."""
        return [(name, parameter.grad is not None) for name, parameter in self._parameters.items()]

    def check_sent(self, parameters: Collection[torch.Tensor]) -> None:
        """Check that no gradients wait that a step is to be taken with.

        Args:
            parameters: What is to be stepped.

        Raises:
            SetupError: If one of their gradients waits.
        """
        waiting = [name for name in self._shown if self._parameters[name] in parameters]
        if waiting:
            raise SetupError(
                f"the gradient of {waiting[0]!r} has waited on its rank since a backward inside no_backward_sync(), "
                "and the last backward outside did not come through its module; run one that does before a step."
            )

    @property
    def touched(self) -> list[str]:
        """The names of those for which something else is shown than was."""
        return [name for name, shown in self._shown.items() if not self._is_shown(name, shown)]

    def drop(self, module: nn.Module) -> None:
        """Throw away what waits, and what is shown for it.

        Args:
            module: The one whose parameters these are.

        Raises:
            SetupError: If users have not thrown away all that is shown, but changed something. It is gone all the
                same, or a later step would be taken with it.
        """
        kept = [name for name in self._shown if self._parameters[name].grad is not None]
        for name in self._shown:
            self._parameters[name].grad = None
        self._shown.clear()
        for part in module.modules():
            drop_deferred_gradients(part)
        if kept:
            raise SetupError(
                f"gradients were changed, or some of them thrown away, {kept[0]!r} for one not, while they wait on "
                "their rank for the end of no_backward_sync(), where nothing reaches them; all of these micro-batches "
                "are thrown away: begin them anew, and change gradients after the last backward, which is outside."
            )

    def drop_all(self, module: nn.Module) -> None:
        """Throw away every gradient, those that wait and those that were sent.

        Args:
            module: The one whose parameters these are.
        """
        for parameter in self._parameters.values():
            parameter.grad = None
        self._shown.clear()
        self._hidden.clear()
        for part in module.modules():
            drop_deferred_gradients(part)

    def begin_backward(self) -> None:
        """Remove the zeros before a backward adds gradients."""
        self._hidden, self._shown = self._shown, {}
        for name, shown in self._hidden.items():
            if shown.zeros:
                self._parameters[name].grad = None

    def _is_shown(self, name: str, shown: _Shown) -> bool:
        gradient = self._parameters[name].grad
        return gradient is shown.gradient and _changes(gradient) == shown.changes

    def _is_left(self, name: str, shown: _Shown) -> bool:
        gradient = self._parameters[name].grad
        return gradient is (None if shown.zeros else shown.gradient) and (
            shown.zeros or _changes(gradient) == shown.changes
        )


def _changes(gradient: torch.Tensor | None) -> tuple[int | None, ...]:
    """Count the changes of a gradient, and those of its shard alone, which are not among them."""
    held = (gradient, gradient.to_local()) if isinstance(gradient, DTensor) else (gradient,)
    return tuple(version_of(each) for each in held if each is not None)
