"""Ranks start, join, fail and hand back results."""

from __future__ import annotations

from shard_core.testing.suites.suite import Suite


class Launching(Suite):
    """Ranks start, join, fail and hand back results."""
