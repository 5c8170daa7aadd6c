"""Seeds give the same weights everywhere and dropout masks that differ where they must."""

from __future__ import annotations

from shard_core.testing.suites.suite import Suite


class Randomness(Suite):
    """Seeds give the same weights everywhere and dropout masks that differ where they must."""
