"""Rounds: the batches that data ranks are handed together, and which of their samples come where in the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """One batch for each data rank.

    Attributes:
        items: How many items of the data were dealt out; what was dealt after them fills the round up.
        in_turn: Whether items are samples, dealt to ranks in turn; otherwise they are whole batches, one for each rank.
        size: How many samples each rank's batch has; None if only its maker knows.
    """

    items: int
    in_turn: bool
    size: int | None = None

    def places(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """List where the samples of the round stand, in the order of the data, without what fills it up.

        Args:
            sizes: How many samples each data rank has.

        Returns:
            Data ranks, and places among the samples of each.

        Example:
            >>> Round(items=3, in_turn=True, size=2).places([2, 2])
            [(0, 0), (1, 0), (0, 1)]
            >>> Round(items=2, in_turn=False).places([2, 1, 2])
            [(0, 0), (0, 1), (1, 0)]
        """
        if self.in_turn:
            return [(rank, place) for place in range(sizes[0]) for rank in range(len(sizes))][: self.items]
        return [(rank, place) for rank, size in enumerate(sizes[: self.items]) for place in range(size)]


class DrawnRounds:
    """The round that each running iteration over a loader has drawn last."""

    def __init__(self) -> None:
        self._rounds: dict[object, tuple[object, Round]] = {}

    def draw(self, iteration: object, loader: object, drawn: Round) -> None:
        """Record what an iteration has drawn.

        Args:
            iteration: Which.
            loader: Over which loader.
            drawn: The round.
        """
        self._rounds.pop(iteration, None)
        self._rounds[iteration] = loader, drawn

    def end(self, iteration: object) -> None:
        """Forget an iteration: that around it, if there is one, has drawn last again."""
        self._rounds.pop(iteration, None)

    def last(self, loader: object | None = None) -> Round | None:
        """Return the round drawn last; None if nothing is iterated over.

        Args:
            loader: Over which loader; None for any.
        """
        rounds = [drawn for owner, drawn in self._rounds.values() if loader is None or owner is loader]
        return rounds[-1] if rounds else None
