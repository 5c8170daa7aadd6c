"""A training state as flat-sharding engines have it: each rank holds one range of every tensor's elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from shard_core.checkpoint.shard import TensorShard, shards_of_range
from shard_core.checkpoint.state import Slot, TrainingState

if TYPE_CHECKING:
    from shard_core.checkpoint.optimizer_record import OptimizerRecord


class FlatState(TrainingState):
    """Full tensors cut at multiples of ``unit`` elements; ``tensors`` are cut on save and whole again by ``whole``."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], rank: int, world_size: int, unit: int = 1) -> None:
        self._shards: list[TensorShard] = []
        self.parts: dict[str, tuple[int, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            per_rank = -(-tensor.numel() // (world_size * unit)) * unit
            start = min(rank * per_rank, tensor.numel())
            stop = min(start + per_rank, tensor.numel())
            flat = tensor.reshape(-1)[start:stop].clone()
            self.parts[key] = (start, flat)
            self._shards += shards_of_range(key, tensor.shape, start, flat)

    @property
    def modules(self) -> Sequence[str]:
        return ("model",)

    def shards(self) -> list[TensorShard]:
        return self._shards

    def aliases(self) -> dict[str, str]:
        return {}

    def optimizers(self) -> dict[str, OptimizerRecord]:
        return {}

    def prepare_load(self, slots: Sequence[Slot]) -> None:
        pass

    def finish_load(self, optimizers: Sequence[OptimizerRecord]) -> None:
        pass


def whole(states: Sequence[FlatState], shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Put the ranks' parts together again."""
    tensors = {}
    for key, shape in shapes.items():
        flat = torch.cat([state.parts[key][1] for state in states])
        assert flat.numel() == math.prod(shape)
        tensors[key] = flat.view(*shape) if shape else flat[0]
    return tensors
