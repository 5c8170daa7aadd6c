"""Ranks talk: every verb, on every dtype and shape, and errors where talking cannot work."""

from __future__ import annotations

from shard_core.testing.suites.suite import Suite


class Talking(Suite):
    """Ranks talk: every verb, on every dtype and shape, and errors where talking cannot work."""
