"""Dividing what is to be moved into batched that memory has room for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batched(items: Iterable[T], length: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Part items into lists that are not longer than asked for together; an item that alone is longer stands alone.

    Args:
        items: What is to be moved, in order.
        length: Tells how long one of them is.
        most: How long those of one list may be together.

    Example:
        >>> list(batched(["ab", "c", "defg", "h"], len, 3))
        [['ab', 'c'], ['defg'], ['h']]
    """
    portion: list[T] = []
    room = most
    for item in items:
        if portion and length(item) > room:
            yield portion
            portion, room = [], most
        portion.append(item)
        room -= length(item)
    if portion:
        yield portion
