"""Uneven calls: units and parameters that the losses of some ranks use alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from shard_core._versions import at_backward_end, deferred_shards, gathered_for, is_compiled
from shard_core.collectives.rank_agreement import check_called_alike
from shard_core.fully_shard.gloo_comm import is_gloo
from shard_core.fully_shard.units import sharded_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shard_core.collectives.interface import Collectives
    from shard_core.fully_shard.units import Unit


def at_end_of(loss: torch.Tensor, called: Callable[[], object]) -> torch.Tensor:
    """Return a loss at the end of whose backward a function is called before torch reduces what is left.

    Args:
        loss: What the backward begins at.
        called: The function.
    """
    if not loss.requires_grad:
        return loss
    seen = loss.view_as(loss)  # whose hook comes before those that units have set on what they returned
    seen.register_hook(lambda _: at_backward_end(called, first=True))
    return seen


class UnevenCalls:
    """Keeps ranks from waiting for each other for good where only some of them call a unit.

    Torch gathers a unit as it is called, so that one which only some ranks call leaves them waiting, and another of the
    same size is gathered in its place without a word. So ranks compare what they call, in one small message,
    before each unit is gathered. Ranks may use different parameters of the root's unit, which is reduced last: who has
    no gradient of one has zeros.

    Args:
        module: A module that is sharded.
        units: Its units.
        mesh: The ranks that it is sharded over.
        collectives: Of all ranks.
        at_once: Whether the gradients of deferred micro-batches are reduced among those ranks one by one.

    Attributes:
        compares: Whether ranks compare what they call; of compiled modules some ranks may run parts in Python.
    """

    def __init__(
        self, module: nn.Module, units: Sequence[Unit], mesh: DeviceMesh, collectives: Collectives, *, at_once: bool
    ) -> None:
        self._module, self._collectives, self._at_once = module, collectives, at_once
        # On a device the host would wait for it before each unit.
        self.compares = is_gloo(mesh) and mesh.size() > 1
        kind = type(module).__name__
        self._names = {part: f"{name!r} of {kind}" if name else kind for name, part in module.named_modules()}
        self._units = {part for unit in units for part in unit.modules}

    def begin(self, part: nn.Module) -> None:
        """Check that all ranks call the same part of the module from outside.

        Raises:
            SetupError: On every rank, if they do not.
        """
        self.compares = self.compares and not is_compiled(self._module)
        self.agree(part)

    def agree(self, part: nn.Module | None, *, ends: bool = False) -> None:
        """Check that all ranks call the same part of the module, or none.

        Args:
            part: What is called; None for a backward.
            ends: Whether its call ends, after which it matters no longer which it was.

        Raises:
            SetupError: On every rank, if they do not.
        """
        if self.compares:
            name = "a backward" if part is None else "the end of a call" if ends else self._names[part]
            check_called_alike(
                name, self._collectives, "leave what only some call out of the units, so that the root's has it, "
            )

    def enter(self, part: nn.Module) -> None:
        """Check that all ranks call a unit, if that is what a part is which is called inside another.

        Raises:
            SetupError: On every rank, if they do not.
        """
        if part in self._units:
            self.agree(part)

    def fill(self) -> None:
        """Set zeros as the gradients that only other ranks have, of units that are yet to be reduced."""
        if not self.compares:
            return
        pairs = [pair for part in sharded_parts(self._module) for pair in gathered_for(cast("nn.Module", part)).items()]
        pairs = [pair for pair in pairs if pair[0].requires_grad]
        parts = () if self._at_once else sharded_parts(self._module)
        waiting: set[torch.Tensor] = set().union(*map(deferred_shards, parts))
        mine = torch.tensor(
            [gathered.grad is not None or shard in waiting for gathered, shard in pairs], dtype=torch.int64
        )
        used = self._collectives.all_reduce(mine, reduce_op="max")
        for (gathered, _), is_mine, is_used in zip(pairs, mine.tolist(), used.tolist(), strict=True):
            if is_used and not is_mine:
                gathered.grad = torch.zeros_like(gathered)
