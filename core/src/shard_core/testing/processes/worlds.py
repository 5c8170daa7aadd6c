"""The worlds of a test session, one of each size and environment."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shard_core.testing.processes.world import World

_NOTHING: Mapping[str, str] = types.MappingProxyType({})


class Worlds:
    """The worlds of a test session: one per size and environment, started when it is first asked for."""

    def __init__(self) -> None:
        self._worlds: dict[tuple[int, frozenset[tuple[str, str]]], World] = {}

    def __call__(self, size: int, environment: Mapping[str, str] = _NOTHING) -> World:
        """Return the world of ``size`` ranks that were started with some environment variables."""
        from shard_core.testing.processes.world import World

        key = size, frozenset(environment.items())
        if key not in self._worlds:
            self._worlds[key] = World(size, environment)
        return self._worlds[key]

    def close(self) -> None:
        """Stop all ranks."""
        for world in self._worlds.values():
            world.close()
