"""How much memory ranks keep from one random program to the next."""

from __future__ import annotations

import gc
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shard_core.testing.processes.world import World

_EVERY = 20
"""Programs from one look to the next: garbage is collected at each, which takes as long as half a program."""
_ENOUGH = 400
"""Programs after which growth is judged: until then caches fill."""
_MOST = 64 * 1024
"""Bytes a program. What strategies that are right keep, 10 to 16 KiB, is torch's and the allocator's."""
_STATM = Path("/proc/self/statm")


class Memory:
    """Follows the resident memory of a world's ranks.

    The first programs load what all later ones use, and a single look may fall on a cache that has just grown. So
    growth is the median slope between looks of the later half, of the rank that keeps most. What torch's compiler keeps
    of each program that it has compiled, be it reset or not, is no strategy's: growth with such a program is left out.
    """

    def __init__(self) -> None:
        self._programs = 0
        self._looks: list[tuple[int, list[int]]] = []
        self._last: list[int] = []
        self._compilers: list[int] = []
        self._compiled = False

    def follow(self, world: World, *, compiled: bool) -> None:
        """Count a program that has ended, compiled or not, and look at the ranks now and then."""
        self._programs += 1
        self._compiled |= compiled
        if self._programs % _EVERY == 0 and _STATM.exists():
            self.add(self._programs, world.run(resident), compiled=self._compiled)
            self._compiled = False

    def add(self, programs: int, sizes: list[int], *, compiled: bool = False) -> None:
        """Take down what each rank held after some programs, in bytes, and whether one since the last was compiled."""
        before, self._last = self._last or sizes, sizes
        kept = [(now - then) * compiled for then, now in zip(before, sizes, strict=True)]
        self._compilers = [sum(pair) for pair in zip(self._compilers or [0] * len(sizes), kept, strict=True)]
        self._looks.append((programs, [size - its for size, its in zip(sizes, self._compilers, strict=True)]))

    @property
    def growth(self) -> float | None:
        """Return how many bytes a rank kept of a program; None before there were looks enough to tell."""
        later = self._looks[len(self._looks) // 2 :]
        if len(later) < 3:
            return None
        ranks = range(len(later[0][1]))
        return max(_slope([(programs, sizes[rank]) for programs, sizes in later]) for rank in ranks)

    @property
    def grows(self) -> bool:
        """Return whether ranks keep so much of each program that something of it must still be held."""
        return self.growth is not None and self.growth > _MOST and self._looks[-1][0] >= _ENOUGH


def resident() -> int:
    """Return the bytes that this process has in memory once garbage is collected."""
    gc.collect()
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _slope(looks: list[tuple[int, int]]) -> float:
    """Compute the median slope of all pairs."""
    pairs = ((one, other) for place, one in enumerate(looks) for other in looks[place + 1 :])
    return statistics.median((after - before) / (later - sooner) for (sooner, before), (later, after) in pairs)
