"""Object outputs: tensors that are attributes of objects, shown to a unit's hooks beside what it has returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.fsdp import fully_shard

from shard_core.gradients import inside_objects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


class Shown(NamedTuple):
    """What a unit has returned, and beside it what torch, which opens tuples, would not find.

    Attributes:
        output: What it has returned.
        inside: The tensors to train through that are attributes of objects in it.
    """

    output: Any
    inside: list[torch.Tensor]

    @classmethod
    def of(cls, output: Any) -> Shown:
        """Build it of what a forward has returned."""
        return cls(output, inside_objects(output))


def shard_unit(modules: Sequence[nn.Module], **options: Any) -> None:
    """Make a unit of modules, one whose gradients may also come through objects that its forwards return.

    Torch gathers a unit's parameters again when a backward comes to a tensor that the unit has returned.

    Args:
        modules: The unit's.
        options: What ``fully_shard`` is told.
    """
    for module in modules:
        module.register_forward_hook(_show)
    fully_shard(list(modules), **options)
    for module in modules:
        module.register_forward_hook(_hide)


def _show(module: nn.Module, args: Any, output: Any) -> Shown | None:
    del module, args
    # Most units return a tensor, and no graph may hold how one looks into objects.
    return None if isinstance(output, torch.Tensor) else _shown(output)


def _hide(module: nn.Module, args: Any, output: Any) -> Any:
    del module, args
    return output.output if isinstance(output, Shown) else None


_shown = torch.compiler.disable(Shown.of)
