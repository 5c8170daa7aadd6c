"""How much host memory there is for copies of what training holds."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

#: One part in so many is left to what else may ask for memory meanwhile.
_LEFT_FREE = 10
#: Where both kinds of control groups show what they allow, what is in use, and what of that the kernel can give back.
_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class Room(NamedTuple):
    """What one rank wants of its host's memory, and what there is.

    Attributes:
        host: The host's name.
        wanted: How many bytes the rank wants.
        available: How many there are for all ranks of the host; None where it is unknown.
    """

    host: str
    wanted: int
    available: int | None


def room_for(wanted: int) -> Room:
    """Return what this process wants of its host's memory, and what there is."""
    return Room(platform.node(), wanted, available_memory())


def crowded_host(rooms: Sequence[Room]) -> Room | None:
    """Return a host that has no room for what its ranks want.

    Args:
        rooms: Every rank's.

    Returns:
        The host, and the sum of what its ranks want; None if all have room.

    Example:
        >>> crowded_host([Room("first", 4, 10), Room("first", 6, 10), Room("second", 6, 10)])
        Room(host='first', wanted=10, available=10)
    """
    wanted: dict[str, int] = {}
    for room in rooms:
        wanted[room.host] = wanted.get(room.host, 0) + room.wanted
    for host, _, available in rooms:
        if available is not None and wanted[host] > available - available // _LEFT_FREE:
            return Room(host, wanted[host], available)
    return None


def available_memory(root: Path = Path("/")) -> int | None:
    """Return how many bytes may be allocated before the system kills a process for it.

    Args:
        root: Where ``proc`` and ``sys`` are.

    Returns:
        The least of what the machine and the control groups of this process have left; None where it is unknown.
    """
    return min((*_of_machine(root), *_of_groups(root)), default=None)


def _of_machine(root: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _of_groups(root: Path) -> Iterator[int]:
    own = {"/"}
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        own |= {path for _, kind, path in (line.split(":", 2) for line in lines) if kind in ("", "memory")}
    # A group is held to the limits of those it is in as well.
    folders = {str(each) for path in own for each in (Path(path), *Path(path).parents)}
    for base, limit, usage, given_back in _GROUPS:
        for folder in sorted(folders):
            here = root / base / folder.lstrip("/")
            with contextlib.suppress(OSError, ValueError):  # where there is no limit, a word stands, or no file
                used = int((here / usage).read_text())
                stat = dict(line.split() for line in (here / "memory.stat").read_text().splitlines())
                yield max(0, int((here / limit).read_text()) - used + int(stat.get(given_back, 0)))
