from __future__ import annotations

import math
import random

import numpy as np

from shard_core.checkpoint.format.box import Box, boxes_of_range


def _random_shape(generator: random.Random, dims: int) -> tuple[int, ...]:
    return tuple(generator.choice([1, 1, 2, 3, 4, 5, 7]) for _ in range(dims))


def _random_box(generator: random.Random, shape: tuple[int, ...]) -> Box:
    bounds = [sorted(generator.sample(range(size + 1), 2)) for size in shape]
    return Box(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))


def test_ranges_are_covered_in_order_by_few_contiguous_boxes():
    generator = random.Random(0)
    for _ in range(3000):
        shape = _random_shape(generator, generator.randint(0, 5))
        volume = math.prod(shape)
        start = generator.randint(0, volume)
        stop = generator.randint(start, volume)
        numbered = np.arange(volume).reshape(shape)
        boxes = boxes_of_range(shape, start, stop)
        elements = [numbered[box.slices((0,) * len(shape))].reshape(-1) for box in boxes]
        assert np.concatenate([np.empty(0, dtype=int), *elements]).tolist() == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        assert [box.volume for box in boxes] == [len(part) for part in elements]


def test_intersection_is_what_two_masks_share():
    generator = random.Random(1)
    for _ in range(1000):
        shape = _random_shape(generator, generator.randint(0, 4))
        one, other = (_random_box(generator, shape) for _ in range(2))
        masks = []
        for box in (one, other):
            mask = np.zeros(shape, dtype=bool)
            mask[box.slices((0,) * len(shape))] = True
            masks.append(mask)
        common = one.intersection(other)
        assert common == other.intersection(one)
        found = np.zeros(shape, dtype=bool)
        if common is not None:
            found[common.slices((0,) * len(shape))] = True
        assert (found == (masks[0] & masks[1])).all()
