"""When the parameters of the next unit are gathered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.fsdp import FSDPModule

from shard_core._versions import in_backward, is_coming, is_gathered, shard_versions
from shard_core.fully_shard.assigned_data import AssignedData
from shard_core.fully_shard.entry_methods import PASS_ON

if TYPE_CHECKING:
    from torch import nn

    from shard_core.fully_shard.units import Unit


def set_prefetching(module: nn.Module, units: Sequence[Unit], *, backward: int | None, forward: int) -> None:
    """Set which other units each gathers beside its own work, and have what was written to since gathered again.

    Args:
        module: A module that was sharded.
        units: Its units.
        backward: How many of the units registered before it each unit gathers before its gradients are computed; None
            leaves it to torch, which gathers the one that was used before.
        forward: How many of the units registered after it each unit gathers before it computes.
    """
    position = {part: number for number, part in enumerate(module.modules())}
    first = sorted({min(unit.modules, key=position.__getitem__) for unit in units} | {module}, key=position.__getitem__)
    gathering = [part for part in first if isinstance(part, FSDPModule)]
    ahead: dict[nn.Module, Sequence[Any]] = {}
    for place, part in enumerate(gathering):
        following: list[FSDPModule] = [*gathering[place + 1 : place + 1 + forward]]
        if following:
            part.set_modules_to_forward_prefetch(following)
            ahead[part] = following
        if backward is not None:
            earlier: list[FSDPModule] = [*gathering[max(place - backward, 0) : place][::-1]]
            # A list that is empty would mean torch's own order; what a unit has gathered is not gathered again.
            part.set_modules_to_backward_prefetch(earlier or [part])
    together = {part: min(unit.modules, key=position.__getitem__) for unit in units for part in unit.modules}
    _GatheredAhead({module: module, **together}, ahead)


class _GatheredAhead:
    """Gathers units again whose shards were written to since another unit has gathered them for it.

    That may be in the forward that writes, or in an earlier one: a unit that runs before the one that gathers it ahead
    is on its way from then on until its next forward. It is taken from how often torch says that a shard was changed,
    of which every rank counts as many; a write through ``parameter.data`` in place is not counted.

    In backward torch gathers ahead by itself. Activation checkpointing runs again there what it wraps, and what stands
    around a unit writes once more before the unit is called.

    Args:
        together: The modules of all units, each with the one that stands for its unit.
        ahead: Which units such a one gathers before it computes.
    """

    def __init__(self, together: Mapping[nn.Module, nn.Module], ahead: Mapping[nn.Module, Sequence[Any]]) -> None:
        self._together, self._ahead = together, ahead
        self._coming: dict[nn.Module, list[int | None]] = {}
        self._called: dict[nn.Module, list[int | None]] = {}
        for part in together:
            # Before torch's own, which gathers; no graph may hold it, as none holds torch's.
            part.register_forward_pre_hook(torch.compiler.disable(self._begin), prepend=True)
        for unit in ahead:  # of which a method calls parts, too
            if hasattr(unit, PASS_ON):
                setattr(unit, PASS_ON, functools.partial(self._pass_on, unit, getattr(unit, PASS_ON)))

    def _begin(self, part: nn.Module, args: Any) -> None:
        del args
        unit = self._together[part]
        again = in_backward()  # where activation checkpointing calls what has run before
        before = self._called.get(unit) if again else self._coming.pop(unit, None)
        now = _changes(unit)
        # What is gathered is what forwards write to.
        if before is not None and is_coming(unit) and before != now:
            gathered = cast("FSDPModule", unit)
            gathered.unshard()  # it is on its way, and torch would go on with that
            gathered.reshard()
        if not again:
            self._called[unit] = now
            self._note_coming(unit)

    def _pass_on(self, unit: nn.Module, call: Callable[..., Any], *args: Any) -> Any:
        self._note_coming(unit)
        return call(*args)

    def _note_coming(self, unit: nn.Module) -> None:
        for each in self._ahead.get(unit, ()):
            if not is_gathered(each) and not is_coming(each):  # what no forward has come to is not gathered again
                self._coming[each] = _changes(each)


def _changes(part: object) -> list[int | None]:
    """Count writes to a unit's shards, and to what of them is on this rank, which averages are written to.

    Assigned data has a count of its own on each rank, which may be that of before.
    """
    return [AssignedData.count(), *shard_versions(part)]
