"""The worlds of a test session, one of each size."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shard_core.testing.world import World


class Worlds:
    """The worlds of a test session: one per size, started when it is first asked for."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        """Return the world of ``size`` ranks."""
        from shard_core.testing.world import World

        if size not in self._worlds:
            self._worlds[size] = World(size)
        return self._worlds[size]

    def close(self) -> None:
        """End all ranks."""
        for world in self._worlds.values():
            world.close()
