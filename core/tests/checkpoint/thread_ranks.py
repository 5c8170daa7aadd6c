"""Ranks as threads of this process: the coordinator's promises without the cost of starting processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from shard_core.collectives.messages import pack, unpack

T = TypeVar("T")


class ThreadCoordinator:
    """One rank's end; what is sent passes through messages, as it does between processes."""

    def __init__(self, rank: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self._rank = rank
        self._barrier = barrier
        self._slots = slots

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return len(self._slots)

    def gather_objects(self, value: T) -> list[T]:
        self._slots[self._rank] = pack(value)
        self._barrier.wait()
        gathered = list(self._slots)
        self._barrier.wait()
        return [unpack(memoryview(message)) for message in gathered]

    def broadcast_object(self, value: T, src: int = 0) -> T:
        return self.gather_objects(value)[src]

    def barrier(self, name: str = "barrier") -> None:
        self._barrier.wait()

    def any_true(self, flag: bool) -> bool:
        return any(self.gather_objects(flag))

    def abort(self) -> None:
        self._barrier.abort()


def on_ranks(world_size: int, function: Callable[[ThreadCoordinator], T]) -> list[T | Exception]:
    """Call a function on every rank; give what it returned or raised, in rank order."""
    barrier = threading.Barrier(world_size, timeout=30)
    slots: list[Any] = [None] * world_size

    def call(rank: int) -> T | Exception:
        try:
            return function(ThreadCoordinator(rank, barrier, slots))
        except Exception as error:  # noqa: BLE001 - handed to the caller, who looks at it
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(call, range(world_size)))


def all_ranks(world_size: int, function: Callable[[ThreadCoordinator], T]) -> list[T]:
    """Call a function on every rank and raise what any raised."""
    results = on_ranks(world_size, function)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results  # type: ignore[return-value]
