"""When the parameters of the next unit are gathered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.fsdp import FSDPModule

from shard_core._versions import in_backward, is_gathered, shards_and_unsharded, version_of

if TYPE_CHECKING:
    from torch import nn

    from shard_core.fully_shard.units import Unit


def set_prefetching(module: nn.Module, units: Sequence[Unit], *, backward: int | None, forward: int) -> None:
    """Set which other units each gathers beside its own work.

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
    for place, part in enumerate(gathering):
        following: list[FSDPModule] = [*gathering[place + 1 : place + 1 + forward]]
        if following:
            part.set_modules_to_forward_prefetch(following)
        if backward is not None:
            earlier: list[FSDPModule] = [*gathering[max(place - backward, 0) : place][::-1]]
            # A list that is empty would mean torch's own order; what a unit has gathered is not gathered again.
            part.set_modules_to_backward_prefetch(earlier or [part])
    if forward:
        _GatheredAhead(module, [part for unit in units for part in unit.modules])


class _GatheredAhead:
    """Gathers units again whose shards a forward has written to since another unit may have gathered them for it.

    That is taken from how often torch says that a shard was changed, of which every rank counts as many; a write
    through ``parameter.data`` in place is not counted.

    Args:
        module: One that was sharded.
        parts: The modules of its units.
    """

    def __init__(self, module: nn.Module, parts: Iterable[nn.Module]) -> None:
        self._parts = list(parts)
        self._changes: dict[nn.Module, list[int | None]] = {}
        # Both before torch's own, which gathers; no graph may hold them, as none holds torch's.
        module.register_forward_pre_hook(torch.compiler.disable(self._begin), prepend=True)
        for part in self._parts:
            part.register_forward_pre_hook(torch.compiler.disable(self._check), prepend=True)

    def _begin(self, module: nn.Module, args: Any) -> None:
        del module, args
        self._changes = {part: _changes(part) for part in self._parts}

    def _check(self, part: nn.Module, args: Any) -> None:
        del args
        # What is gathered is what forwards write to; activation checkpointing calls again what has run before.
        if is_gathered(part) or in_backward():
            return
        before, self._changes[part] = self._changes.get(part), _changes(part)
        if before != self._changes[part]:
            unit = cast("FSDPModule", part)
            unit.unshard()  # it may be on its way, and torch would go on with that
            unit.reshard()


def _changes(part: nn.Module) -> list[int | None]:
    return [version_of(shard) for shard, _ in shards_and_unsharded(part)]
