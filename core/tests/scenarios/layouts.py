"""Layouts of tensors over ranks as engines have them, made up by hypothesis, and a state that lies in one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from shard_core.checkpoint.format.box import Box
from shard_core.checkpoint.state.shard import TensorShard, shards_of_range
from shard_core.checkpoint.state.training_state import Slot, TrainingState

if TYPE_CHECKING:
    import torch
    from hypothesis.strategies import DrawFn, SearchStrategy

    from shard_core.checkpoint.state.optimizer_record import OptimizerRecord

SHAPES: SearchStrategy[tuple[int, ...]] = st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7]), max_size=4).map(tuple)


@dataclasses.dataclass(frozen=True)
class Flat:
    """Elements in a row, padded to a multiple of ``unit`` per rank, as ZeRO and XLA shard them.

    ``unit`` is 1 for the smallest padding there is.
    """

    ranks: int
    unit: int

    def shards(self, key: str, tensor: torch.Tensor, rank: int) -> list[TensorShard]:
        """Return a rank's range of the elements, in memory of its own."""
        each = -(-tensor.numel() // (self.ranks * self.unit)) * self.unit
        start, stop = (min(place * each, tensor.numel()) for place in (rank, rank + 1))
        return shards_of_range(key, tensor.shape, start, tensor.reshape(-1)[start:stop].clone())


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Boxes over a mesh of one or two axes, split unevenly where they do not divide, as DTensor does.

    ``dims`` names the dim each axis shards, counted around the tensor's dims; None where an axis holds copies. Of the
    copies that of the rank at ``writer``, counted around, is saved. ``strided`` views share a larger tensor's memory.
    """

    sizes: tuple[int, ...]
    dims: tuple[int | None, ...]
    writer: int
    strided: bool

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    def shards(self, key: str, tensor: torch.Tensor, rank: int) -> list[TensorShard]:
        """Return a rank's box."""
        offsets, extent, write = [0] * tensor.dim(), list(tensor.shape), True
        for axis, size in enumerate(self.sizes):
            place = rank // math.prod(self.sizes[axis + 1 :]) % size
            chosen = self.dims[axis]
            if chosen is None or not extent:
                write = write and place == self.writer % size
                continue
            dim = chosen % len(extent)
            length = -(-extent[dim] // size)
            start = min(length * place, extent[dim])
            offsets[dim] += start
            extent[dim] = min(length, extent[dim] - start)
        box = Box(tuple(offsets), tuple(extent))
        view = tensor.clone()[box.slices((0,) * tensor.dim())]
        view = view if self.strided else view.contiguous()
        return [TensorShard(key=key, shape=tuple(tensor.shape), offsets=box.offsets, view=view, write=write)]


Layout = Flat | Mesh


@st.composite
def layouts(draw: DrawFn, most_ranks: int = 4) -> Layout:
    """Draw a layout."""
    if draw(st.booleans()):
        return Flat(draw(st.integers(1, most_ranks)), draw(st.sampled_from([1, 2, 8])))
    first = draw(st.integers(1, most_ranks))
    sizes = (first, *draw(st.lists(st.integers(1, most_ranks // first), max_size=1)))
    dim = st.none() | st.integers(0, 3)
    dims = tuple(draw(st.lists(dim, min_size=len(sizes), max_size=len(sizes))))
    return Mesh(sizes, dims, draw(st.integers(0, most_ranks - 1)), draw(st.booleans()))


class LaidOutState(TrainingState):
    """One rank's shards of full tensors, each in the one layout."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], layout: Layout, rank: int) -> None:
        self._shards = [shard for key, tensor in tensors.items() for shard in layout.shards(key, tensor, rank)]

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
