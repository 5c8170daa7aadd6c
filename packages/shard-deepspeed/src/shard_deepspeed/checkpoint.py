"""The state of modules under ZeRO: each rank says which run of which parameter it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shard_core.backend import TensorState

if TYPE_CHECKING:
    import torch

    from shard_core.backend import FlatPart, OptimizerRecord
    from shard_deepspeed.zero import ZeroModule


class ZeroState(TensorState):
    """What is saved and filled is what optimizers step: the float32 copy of a parameter, where there is one.

    Args:
        modules: Modules by the user's names.
        optimizers: Optimizers over their parameters, by the user's names.
        rank: This rank.
        world_size: How many there are.
        sharded: Those of the modules that DeepSpeed shards.
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        rank: int,
        world_size: int,
        sharded: Sequence[ZeroModule],
    ) -> None:
        self._sharded = sharded

        def part_of(tensor: torch.Tensor) -> FlatPart | None:
            return next((part for part in (zero.part_of(tensor) for zero in sharded) if part is not None), None)

        super().__init__(modules, optimizers, rank=rank, world_size=world_size, flat_part=part_of)

    def finish_load(self, optimizers: Sequence[OptimizerRecord]) -> None:
        """Restore the rest, and copy what was filled to where forwards read it."""
        super().finish_load(optimizers)
        for zero in self._sharded:
            zero.publish()
