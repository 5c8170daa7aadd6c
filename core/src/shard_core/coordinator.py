"""The small protocol by which parts exchange values between ranks without knowing the collectives."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

T = TypeVar("T")

#: The environment variable that holds what the ranks of one run share and nobody else knows; launchers set it.
SECRET_VARIABLE = "SHARD_SECRET"


class Coordinator(Protocol):
    """What a checkpoint commits through and a gradient scaler agrees through.

    Every method but the two properties is collective: all ranks call it, in the same order.
    Collectives implement it; a test may hand in an object of its own.

    What is sent consists of None, booleans, numbers, strings, bytes, torch dtypes, dense tensors, NumPy arrays of
    numbers, and lists, tuples and dicts of them. It is never pickled, so that whoever reaches the ranks' ports can run
    nothing in them; an object of any other class is a ``CollectiveError`` on every rank that waits for it.
    """

    @property
    def rank(self) -> int:
        """This process's place in the world, from 0."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def broadcast_object(self, value: T, src: int = 0) -> T:
        """Return rank ``src``'s ``value`` on every rank."""

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's ``value`` on every rank, in rank order."""

    def barrier(self, name: str = "barrier") -> None:
        """Wait for every rank; one that does not come is named by ``MissingRank``."""

    def any_true(self, flag: bool) -> bool:
        """Return on every rank whether ``flag`` is true on any."""

    def side_channel(self) -> AbstractContextManager[Coordinator]:
        """Open a side channel to the same ranks, for a task that runs in the background.

        What goes over it waits for no message of training and holds none up, so another thread may use it.

        Returns:
            A context that yields the channel; a rank that dies while others are inside is named by ``MissingRank``.

        Raises:
            MissingCapability: If there can be none.
        """
