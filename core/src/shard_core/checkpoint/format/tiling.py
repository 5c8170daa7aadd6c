"""How boxes tile a tensor, stored once for all tensors that are tiled alike."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from shard_core.checkpoint.format.box import Box, Integers


@dataclasses.dataclass(frozen=True, eq=False)
class Tiling:
    """The boxes of any tensor of one shape.

    Attributes:
        shape: The tensor's shape.
        offsets: One row per box, one column per dim.
        sizes: Likewise.

    Example:
        >>> Tiling((4,), np.array([[0], [3]]), np.array([[3], [1]])).overlaps(Box((2,), (2,)))
        ((0, Box(offsets=(2,), sizes=(1,))), (1, Box(offsets=(3,), sizes=(1,))))
    """

    shape: tuple[int, ...]
    offsets: Integers
    sizes: Integers

    def __len__(self) -> int:
        """Count the boxes."""
        return len(self.offsets)

    @functools.cached_property
    def volumes(self) -> Integers:
        """How many elements each box holds."""
        volumes: Integers = self.sizes.prod(axis=1, dtype=np.int64)
        return volumes

    def fits(self) -> bool:
        """Return whether no box is larger than the tensor; the product of two wild sizes may look harmless."""
        return not ((self.sizes < 0) | (self.sizes > np.asarray(self.shape, dtype=np.int64))).any()

    def flaw(self) -> str | None:
        """Return what keeps the boxes from tiling the tensor; None if they do."""
        return tiling_flaw(self.shape, self.offsets, self.sizes)

    def overlaps(self, box: Box) -> tuple[tuple[int, Box], ...]:
        """Return which boxes share elements with another one, and which."""
        if box not in self._overlaps:
            first = np.asarray(box.offsets, dtype=np.int64)
            end = first + np.asarray(box.sizes, dtype=np.int64)
            rows = np.flatnonzero(((self.offsets < end) & (self.offsets + self.sizes > first)).all(axis=1))
            shared = ((row, self.box(row).intersection(box)) for row in rows.tolist())
            self._overlaps[box] = tuple((row, common) for row, common in shared if common is not None)
        return self._overlaps[box]

    @functools.cached_property
    def _overlaps(self) -> dict[Box, tuple[tuple[int, Box], ...]]:
        """A cache: a rank wants the same box of most tensors that are tiled alike."""
        return {}

    def box(self, row: int) -> Box:
        """Return one box."""
        return Box(tuple(self.offsets[row].tolist()), tuple(self.sizes[row].tolist()))


def tiling_flaw(shape: Sequence[int], offsets: Integers, sizes: Integers) -> str | None:
    """Return what keeps boxes from covering a tensor exactly once.

    Args:
        shape: The tensor's shape.
        offsets: One row per box, one column per dim.
        sizes: Likewise.

    Returns:
        What is wrong, or None if the boxes tile the tensor.

    Example:
        >>> tiling_flaw((4,), np.array([[0], [3]]), np.array([[2], [1]]))
        'boxes hold 3 of its 4 elements'
    """
    extent = np.asarray(shape, dtype=np.int64)
    if (offsets < 0).any() or (sizes < 0).any() or (sizes > extent).any() or (offsets > extent - sizes).any():
        return "a box reaches outside it"
    volume = math.prod(shape)
    held = int(sizes.prod(axis=1, dtype=np.int64).sum()) if len(sizes) else 0
    if held != volume:
        return f"boxes hold {held} of its {volume} elements"
    occupied = sizes.all(axis=1)
    # As many elements as the tensor has, all inside it: either they tile it or two boxes overlap.
    if _overlap(offsets[occupied], (offsets + sizes)[occupied], first_dim=0):
        return "two boxes overlap"
    return None


def _overlap(starts: Integers, stops: Integers, first_dim: int) -> bool:
    """Return whether any two boxes share an element.

    Boxes are separated wherever a plane passes between them, dim by dim, until each stands alone; shards of
    any usual layout separate that way, in about the time of sorting them. What no plane separates is compared
    pair by pair.
    """
    count, dims = starts.shape
    if count <= 1:
        return False
    for dim in range(first_dim, first_dim + dims):
        dim %= dims  # noqa: PLW2901 - dims are tried in a circle
        order = np.argsort(starts[:, dim], kind="stable")
        reach = np.maximum.accumulate(stops[order, dim])
        separated = np.flatnonzero(starts[order[1:], dim] >= reach[:-1]) + 1
        if len(separated) == count - 1:
            return False
        if len(separated):
            groups = (group for group in np.split(order, separated) if len(group) > 1)
            return any(_overlap(starts[group], stops[group], dim + 1) for group in groups)
    return any(
        bool(((starts[i] < stops[i + 1 :]) & (starts[i + 1 :] < stops[i])).all(axis=1).any()) for i in range(count - 1)
    )
