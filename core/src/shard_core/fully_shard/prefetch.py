"""When the parameters of the next unit are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule

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
