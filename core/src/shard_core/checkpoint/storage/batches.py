"""Splitting what is to be moved into batches that memory has room for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batched(items: Iterable[T], length: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield items in lists of limited length; an item that is longer is in a list of its own.

    Args:
        items: What is to be moved, in order.
        length: Returns how long one of them is.
        most: How long those of one list may be in sum.

    Example:
        >>> list(batched(["ab", "c", "defg", "h"], len, 3))
        [['ab', 'c'], ['defg'], ['h']]
    """
    batch: list[T] = []
    room = most
    for item in items:
        if batch and length(item) > room:
            yield batch
            batch, room = [], most
        batch.append(item)
        room -= length(item)
    if batch:
        yield batch
