"""Ragged columns: segments one after another, one for each of many things, to whose ends values are added."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from shard_core.checkpoint.format.box import Integers


class Piece:
    """What is added at once: some values to each of some segments.

    Args:
        segments: The segments, none of them twice.
        lengths: How many values each of them gets.
    """

    def __init__(self, segments: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer]) -> None:
        self.segments = segments
        self.lengths = lengths
        self.segment_of_value = np.repeat(segments, lengths)
        self.place_in_piece = ranges(np.zeros(len(lengths), dtype=np.int64), lengths)


class RaggedColumn:
    """The segments of a column, one after another, each as long as the sum of its pieces.

    Args:
        count: How many segments there are.
        pieces: What will be added, and how often.

    Attributes:
        lengths: How long each segment will be.

    Example:
        >>> piece = Piece(np.array([0, 2]), np.array([1, 2]))
        >>> column = RaggedColumn(3, [(piece, 2)])
        >>> [column.add(piece).tolist() for _ in range(2)]
        [[0, 2, 3], [1, 4, 5]]
    """

    def __init__(self, count: int, pieces: Iterable[tuple[Piece, int]]) -> None:
        self.lengths = np.zeros(count, dtype=np.int64)
        for piece, times in pieces:
            self.lengths[piece.segments] += times * piece.lengths.astype(np.int64)
        self._ends = starts(self.lengths)[:-1]

    def __len__(self) -> int:
        """Count the values of all segments."""
        return int(self.lengths.sum())

    def add(self, piece: Piece) -> Integers:
        """Return where in the column the values of the next piece belong."""
        places: Integers = self._ends[piece.segment_of_value] + piece.place_in_piece
        self._ends[piece.segments] += piece.lengths
        return places


def starts(counts: npt.ArrayLike) -> Integers:
    """Return where each of several segments begins, and where the last ends.

    Example:
        >>> starts([2, 0, 3]).tolist()
        [0, 2, 2, 5]
    """
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


def ranges(begins: Integers, lengths: npt.NDArray[np.integer]) -> Integers:
    """Count up from each of several numbers, each by its length.

    Example:
        >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
        [5, 6, 0, 1, 2]
    """
    places: Integers = np.repeat(begins - starts(lengths)[:-1], lengths) + np.arange(int(lengths.sum()))
    return places
