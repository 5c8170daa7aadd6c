"""Whatever the layout: ranges are covered exactly, and what one world writes another reads, bit for bit."""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.bits import random_bits, same_bits
from fixtures.thread_ranks import all_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import SHAPES, LaidOutState, Layout, layouts

from shard_core.checkpoint.format.box import Box, boxes_of_range
from shard_core.checkpoint.format.dtypes import ITEM_SIZES, torch_dtype
from shard_core.checkpoint.format.tiling import tiling_flaw
from shard_core.checkpoint.inspection.verify import verify
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO

pytestmark = pytest.mark.slow

# Derandomized, so that a run says the same each time; the long ones look further.
_FEW = settings(deadline=None, database=None, derandomize=True, max_examples=100)
_FEW_SAVES = settings(_FEW, max_examples=40)
_MANY = settings(deadline=None, database=None, max_examples=20_000)
_MANY_SAVES = settings(_MANY, max_examples=1500)

_EXTENTS = st.sampled_from([0, 1, 1, 2, 3, 7]) | st.integers(1, 2**40)
_HUGE_SHAPES = st.lists(_EXTENTS, max_size=6).map(tuple).filter(lambda shape: math.prod(shape) < 2**62)


@st.composite
def _ranges(draw):
    shape = draw(_HUGE_SHAPES)
    ends = st.integers(0, math.prod(shape))
    return shape, *sorted((draw(ends), draw(ends)))


def _begin(shape: tuple[int, ...], box: Box) -> int:
    """Count the elements of a tensor before the first of a box."""
    return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(box.offsets))


def _is_contiguous(shape: tuple[int, ...], box: Box) -> bool:
    """Return whether a box's elements follow one another: one in each dim, then any number, then all."""
    inner = list(itertools.dropwhile(lambda pair: pair[0] == 1, zip(box.sizes, shape, strict=True)))
    return all(size == extent for size, extent in inner[1:])


def _check_range(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    boxes = boxes_of_range(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    place = start
    for box in boxes:
        assert box.volume > 0
        assert all(a >= 0 and a + size <= extent for a, size, extent in zip(box.offsets, box.sizes, shape, strict=True))
        assert _is_contiguous(shape, box)
        assert _begin(shape, box) == place
        place += box.volume
    assert place == max(start, stop)
    rest = [*boxes_of_range(shape, 0, start), *boxes, *boxes_of_range(shape, stop, math.prod(shape))]
    columns = ([getattr(box, side) for box in rest] for side in ("offsets", "sizes"))
    assert tiling_flaw(shape, *(np.array(c, dtype=np.int64).reshape(len(rest), len(shape)) for c in columns)) is None


@_FEW
@given(_ranges())
def test_ranges_of_any_size_are_covered_exactly(case):
    _check_range(case)


@pytest.mark.long
@_MANY
@given(_ranges())
def test_many_ranges_of_any_size_are_covered_exactly(case):
    _check_range(case)


_DTYPES = st.sampled_from(sorted(ITEM_SIZES)).map(torch_dtype)
_TENSORS = st.lists(st.tuples(SHAPES, _DTYPES), min_size=1, max_size=5)
_CASES = given(
    described=_TENSORS,
    writers=layouts(),
    readers=layouts(),
    form=st.sampled_from(["sharded", "full"]),
    seed=st.integers(0, 2**32 - 1),
)


def _check_resharding(described, writers: Layout, readers: Layout, form: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"model.{number}": random_bits(shape, dtype, generator) for number, (shape, dtype) in enumerate(described)
    }

    def save(coordinator):
        state = LaidOutState(tensors, writers, coordinator.rank)
        io.save(path, state, {}, coordinator=coordinator, information={}, state_dict_type=form)

    def load(coordinator):
        blank = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
        state = LaidOutState(blank, readers, coordinator.rank)
        io.load(path, state, coordinator=coordinator)
        for shard in state.shards():
            wanted = tensors[shard.key][shard.box.slices((0,) * len(shard.shape))]
            assert same_bits(shard.view, wanted), (coordinator.rank, shard.key, shard.box)

    with tempfile.TemporaryDirectory() as folder:
        io, path = ShardedCheckpointIO(), Path(folder) / "checkpoint"
        all_ranks(writers.ranks, save)
        assert verify(path).is_fine
        all_ranks(readers.ranks, load)


@_FEW_SAVES
@_CASES
def test_what_one_layout_writes_another_reads(described, writers, readers, form, seed):
    _check_resharding(described, writers, readers, form, seed)


@pytest.mark.long
@_MANY_SAVES
@_CASES
def test_what_any_layout_writes_any_other_reads(described, writers, readers, form, seed):
    _check_resharding(described, writers, readers, form, seed)
