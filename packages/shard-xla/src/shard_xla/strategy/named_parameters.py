"""What ``parameters()`` lists while a forward runs: the whole parameters, which a penalty is computed from."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from shard_xla import _versions
from shard_xla.strategy.units import units_of

if TYPE_CHECKING:
    from torch import nn


def list_wholes_inside(root: nn.Module) -> None:
    """Have ``parameters()``, inside the forward of a unit, list that unit's whole parameters instead of its shards.

    A loss that reads shards would be another on each rank, and so would an evaluation, without a word.

    Args:
        root: A module that was sharded.
    """
    units = list(units_of(root))

    @functools.wraps(torch.nn.Module.named_parameters)
    def named_parameters(part: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        listed = type(part).named_parameters(part, *args, **kwargs)
        running = [unit for unit in units if unit.running]
        if not running:
            return listed
        wholes = {id(shard): whole for unit in running for whole, shard in _versions.full_and_shards(unit)}
        return ((name, wholes.get(id(each), each)) for name, each in listed)

    for part in root.modules():
        vars(part)[named_parameters.__name__] = types.MethodType(named_parameters, part)
