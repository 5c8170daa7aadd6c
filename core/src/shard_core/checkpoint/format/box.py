"""Axis-aligned boxes of tensors: intersecting them, and splitting flat ranges into them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Box:
    """The part ``[offset, offset + size)`` of a tensor, along every dim.

    Attributes:
        offsets: First index along each dim.
        sizes: Extent along each dim; empty for a tensor without dims, whose only element it is.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that is all of a tensor.

        Example:
            >>> Box.whole((2, 3))
            Box(offsets=(0, 0), sizes=(2, 3))
        """
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """How many elements it holds."""
        return math.prod(self.sizes)

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Return the index of this box inside a larger one that begins at ``origin``.

        Example:
            >>> Box((4, 0), (2, 3)).slices((3, 0))
            (slice(1, 3, None), slice(0, 3, None))
        """
        return tuple(
            slice(offset - start, offset - start + size)
            for offset, size, start in zip(self.offsets, self.sizes, origin, strict=True)
        )

    def intersection(self, other: Box) -> Box | None:
        """Return the box both share, or None if they share no element.

        Example:
            >>> Box((0, 0), (4, 2)).intersection(Box((3, 1), (4, 4)))
            Box(offsets=(3, 1), sizes=(1, 1))
        """
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = (
            min(a + x, b + y) for a, x, b, y in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def span(self, whole: Box) -> tuple[int, int]:
        """Return the first of its elements and the one after the last, counted row by row in a larger box.

        Example:
            >>> Box((1, 1), (2, 2)).span(Box.whole((4, 3)))
            (4, 9)
        """
        first = last = 0
        for size, along in zip(whole.sizes, self.slices(whole.offsets), strict=True):
            first, last = first * size + along.start, last * size + along.stop - 1
        return first, last + 1

    def pieces(self, whole: Box, most: int) -> Iterator[Box]:
        """Split it into boxes of which none spans more than so many elements of a larger box.

        Example:
            >>> [piece.offsets for piece in Box.whole((4, 3)).pieces(Box.whole((4, 3)), 6)]
            [(0, 0), (2, 0)]
        """
        if not self.volume:
            return
        first, last = self.span(whole)
        dim = next((dim for dim, size in enumerate(self.sizes) if size > 1), None)
        if last - first <= most or dim is None:
            yield self
            return
        half = self.sizes[dim] // 2
        for start, size in ((0, half), (half, self.sizes[dim] - half)):
            offsets = (*self.offsets[:dim], self.offsets[dim] + start, *self.offsets[dim + 1 :])
            yield from Box(offsets, (*self.sizes[:dim], size, *self.sizes[dim + 1 :])).pieces(whole, most)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Split a range of a tensor's elements, counted row by row, into boxes.

    Each box is contiguous in the range, so that a flat shard is its boxes' views one after another.
    There are at most ``2 * len(shape) - 1``.

    Args:
        shape: The tensor's shape.
        start: First element of the range.
        stop: One past the last.

    Returns:
        The boxes in the order of their elements; none for an empty range.

    Example:
        >>> for box in boxes_of_range((4, 3), 2, 10):
        ...     print(box.offsets, box.sizes)
        (0, 2) (1, 1)
        (1, 0) (2, 3)
        (3, 0) (1, 1)
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop - start,)) if shape else Box((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # begins and ends inside one row
        return _inside_row(shape, last, start - last * row, stop - last * row)
    boxes = _inside_row(shape, first - 1, start - (first - 1) * row, row) if start < first * row else []
    if first < last:
        boxes.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    return boxes + _inside_row(shape, last, 0, stop - last * row)


def _inside_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes_of_range(shape[1:], start, stop)]
