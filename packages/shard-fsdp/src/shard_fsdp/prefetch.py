"""When the parameters of the next unit are gathered."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from torch import nn

    from shard_core.units import Unit


def set_prefetching(module: nn.Module, units: Sequence[Unit], *, backward: bool, forward: bool) -> None:
    """Tell units which others to gather beside their own work.

    Args:
        module: A module that was sharded.
        units: Its units.
        backward: Whether the next unit is gathered before the gradients of one are computed; if not, no two are whole
            at a time.
        forward: Whether each unit gathers the one registered after it before it computes.
    """
    position = {part: number for number, part in enumerate(module.modules())}
    first = sorted({min(unit.modules, key=position.__getitem__) for unit in units} | {module}, key=position.__getitem__)
    gathering = [part for part in first if isinstance(part, FSDPModule)]
    if forward:
        for part, following in itertools.pairwise(gathering):
            part.set_modules_to_forward_prefetch([following])
    if not backward:
        for part in gathering:
            # A list that is empty would mean torch's own order; what a unit has gathered is not gathered again.
            part.set_modules_to_backward_prefetch([part])
