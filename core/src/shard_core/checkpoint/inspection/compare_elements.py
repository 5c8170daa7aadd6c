"""How far the elements of two stored tensors differ, compared a piece at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from shard_core.checkpoint.format.box import Box

if TYPE_CHECKING:
    from shard_core.checkpoint.inspection.opened import OpenedCheckpoint

_PIECE = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElementDifferences:
    """How far the elements of one pair of tensors differ.

    Attributes:
        differing: How many elements are not the same bits; of unlike dtypes, not the same number.
        elements: How many there are.
        absolute: The largest difference of two elements.
        relative: The same, relative to the largest finite magnitude in either tensor.
    """

    differing: int
    elements: int
    absolute: float
    relative: float


def element_differences(
    first: OpenedCheckpoint, first_key: str, second: OpenedCheckpoint, second_key: str
) -> ElementDifferences | None:
    """Compare two stored tensors of one shape, however each is split into chunks.

    Args:
        first: A checkpoint.
        first_key: The tensor in it.
        second: Another.
        second_key: The tensor in that.

    Returns:
        What differs; None if nothing does.

    Raises:
        CheckpointCorrupted: If either is damaged.
    """
    shape = first.index.record(first_key).shape
    for side, key in ((first, first_key), (second, second_key)):
        side.reader.release()
        side.reader.verify(side.reader.plan(key, Box.whole(shape)))
    # Most tensors are the same, and that is seen without computing anything.
    if all(_same(a, b) for a, b in _common_boxes(first, first_key, second, second_key)):
        return None
    tally = _Tally()
    for a, b in _common_boxes(first, first_key, second, second_key):
        for piece_a, piece_b in pieces_of(a, b):
            tally.add(piece_a, piece_b)
    return tally.result() if tally.differing else None


def _common_boxes(
    first: OpenedCheckpoint, first_key: str, second: OpenedCheckpoint, second_key: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Read the boxes that are in one chunk on either side, a little at a time."""
    whole = Box.whole(first.index.record(first_key).shape)
    for here in first.reader.plan(first_key, whole):
        for there in second.reader.plan(second_key, here.box):
            for box in there.box.pieces(there.box, _PIECE):
                sides = (first.reader, here), (second.reader, there)
                a, b = (reader.view(dataclasses.replace(read, box=box)) for reader, read in sides)
                yield a, b


def pieces_of(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Split two tensors of one shape alike, so that computing with a piece takes little memory."""
    if a.numel() <= _PIECE:
        yield a, b
        return
    dim = max(range(a.dim()), key=lambda each: a.shape[each])
    rows = max(1, a.shape[dim] * _PIECE // a.numel())
    for piece_a, piece_b in zip(a.split(rows, dim), b.split(rows, dim), strict=True):
        yield from pieces_of(piece_a, piece_b)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View elements as integers, of which even NaN equals itself and a zero not another."""
    return tensor.view(_BITS[tensor.element_size()])


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


class _Tally:
    def __init__(self) -> None:
        self.differing = 0
        self._elements = 0
        self._absolute = 0.0
        self._magnitude = 0.0

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        x, y = _numbers(a), _numbers(b)
        unlike = _bits(a) != _bits(b) if a.dtype == b.dtype else (x != y) & ~(x.isnan() & y.isnan())
        self._elements += a.numel()
        self.differing += int(unlike.sum())
        gaps = torch.where(unlike, (x - y).abs(), 0.0)
        self._absolute = max(self._absolute, float(gaps.nan_to_num(nan=float("inf")).max()))
        for numbers in (x, y):
            magnitudes = numbers.abs()
            self._magnitude = max(self._magnitude, float(torch.where(magnitudes.isfinite(), magnitudes, 0.0).max()))

    def result(self) -> ElementDifferences:
        # Without a magnitude all numbers are zeros, or not finite.
        relative = self._absolute / self._magnitude if self._magnitude else self._absolute
        return ElementDifferences(
            differing=self.differing, elements=self._elements, absolute=self._absolute, relative=relative
        )
