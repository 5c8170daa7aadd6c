"""How a tensor is cut into boxes, told once for all tensors that are cut alike."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from shard_core.checkpoint.format.box import Box, Integers, tiling_flaw


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
        """Tell whether no box is larger than the tensor; the product of two wild sizes may look harmless."""
        return not ((self.sizes < 0) | (self.sizes > np.asarray(self.shape, dtype=np.int64))).any()

    def flaw(self) -> str | None:
        """Tell what keeps the boxes from tiling the tensor; None if they do."""
        return tiling_flaw(self.shape, self.offsets, self.sizes)

    def overlaps(self, box: Box) -> tuple[tuple[int, Box], ...]:
        """Tell which boxes share elements with another one, and which."""
        if box not in self._overlaps:
            first = np.asarray(box.offsets, dtype=np.int64)
            end = first + np.asarray(box.sizes, dtype=np.int64)
            rows = np.flatnonzero(((self.offsets < end) & (self.offsets + self.sizes > first)).all(axis=1))
            shared = ((row, self.box(row).intersection(box)) for row in rows.tolist())
            self._overlaps[box] = tuple((row, common) for row, common in shared if common is not None)
        return self._overlaps[box]

    @functools.cached_property
    def _overlaps(self) -> dict[Box, tuple[tuple[int, Box], ...]]:
        """What was asked once: a rank wants the same box of most tensors that are cut alike."""
        return {}

    def box(self, row: int) -> Box:
        """Give one box."""
        return Box(tuple(self.offsets[row].tolist()), tuple(self.sizes[row].tolist()))
