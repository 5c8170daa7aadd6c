"""What is saved comes back bit for bit, at any world size and under any strategy."""

from __future__ import annotations

from shard_core.testing.suites.suite import Suite


class RoundTrip(Suite):
    """What is saved comes back bit for bit, at any world size and under any strategy."""
