from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest

from shard_core.checkpoint.format.box import Box, boxes_of_range
from shard_core.checkpoint.format.tiling import tiling_flaw


def _random_shape(generator: random.Random, dims: int) -> tuple[int, ...]:
    return tuple(generator.choice([1, 1, 2, 3, 4, 5, 7]) for _ in range(dims))


def _columns(boxes: list[Box], dims: int) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(len(boxes), dims)
    sizes = np.array([box.sizes for box in boxes], dtype=np.int64).reshape(len(boxes), dims)
    return offsets, sizes


def _tiled(generator: random.Random, box: Box, depth: int) -> list[Box]:
    """Split a box in two along a random dim, again and again."""
    dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if not depth or not dims:
        return [box]
    dim = generator.choice(dims)
    at = generator.randint(1, box.sizes[dim] - 1)
    low, high = list(box.sizes), list(box.sizes)
    low[dim], high[dim] = at, box.sizes[dim] - at
    start = list(box.offsets)
    start[dim] += at
    halves = [Box(box.offsets, tuple(low)), Box(tuple(start), tuple(high))]
    return [box for half in halves for box in _tiled(generator, half, depth - 1)]


def test_tilings_are_told_from_what_only_looks_like_one():
    generator = random.Random(2)
    for _ in range(500):
        shape = _random_shape(generator, generator.randint(1, 4))
        boxes = _tiled(generator, Box.whole(shape), 5)
        generator.shuffle(boxes)
        assert tiling_flaw(shape, *_columns(boxes, len(shape))) is None
        assert "elements" in str(tiling_flaw(shape, *_columns(boxes[1:], len(shape))))
        assert "elements" in str(tiling_flaw(shape, *_columns([*boxes, boxes[0]], len(shape))))
        twins = [box for box in boxes[1:] if box.volume == boxes[0].volume]
        if twins:
            doubled = [twins[0] if box == boxes[0] else box for box in boxes]
            assert tiling_flaw(shape, *_columns(doubled, len(shape))) == "two boxes overlap"


def test_boxes_that_no_plane_parts_are_still_a_tiling():
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    assert tiling_flaw((3, 3), *_columns(pinwheel, 2)) is None
    clash = [*pinwheel[:-1], Box((0, 1), (1, 1))]
    assert tiling_flaw((3, 3), *_columns(clash, 2)) == "two boxes overlap"


@pytest.mark.parametrize(
    "box", [Box((-1,), (2,)), Box((3,), (2,)), Box((0,), (5,)), Box((2**62,), (2**62,)), Box((5,), (-1,))]
)
def test_boxes_outside_their_tensor_are_refused(box: Box):
    assert tiling_flaw((4,), *_columns([box], 1)) == "a box reaches outside it"


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_empty_tensors_are_tiled_by_nothing_and_by_empty_boxes(shape: tuple[int, ...]):
    assert tiling_flaw(shape, *_columns([], len(shape))) is None
    assert tiling_flaw(shape, *_columns([Box.whole(shape), Box.whole(shape)], len(shape))) is None


def test_a_tensor_without_dims_has_one_box():
    assert tiling_flaw((), *_columns([Box((), ())], 0)) is None
    assert tiling_flaw((), *_columns([], 0)) == "boxes hold 0 of its 1 elements"
    assert tiling_flaw((), *_columns([Box((), ())] * 2, 0)) == "boxes hold 2 of its 1 elements"


def test_many_regular_boxes_are_checked_about_as_fast_as_sorted():
    slabs = [Box((row, 0), (1, 8)) for row in range(16384)]
    grid = [Box((4 * i, 4 * j), (4, 4)) for i, j in itertools.product(range(128), repeat=2)]
    flat = [box for start in range(0, 16384 * 7, 7) for box in boxes_of_range((16384, 7), start, start + 5)]
    flat += [box for start in range(5, 16384 * 7, 7) for box in boxes_of_range((16384, 7), start, start + 2)]
    begin = time.perf_counter()
    assert tiling_flaw((16384, 8), *_columns(slabs, 2)) is None
    assert tiling_flaw((512, 512), *_columns(grid, 2)) is None
    assert tiling_flaw((16384, 7), *_columns(flat, 2)) is None
    assert time.perf_counter() - begin < 10  # comparing all pairs takes minutes
