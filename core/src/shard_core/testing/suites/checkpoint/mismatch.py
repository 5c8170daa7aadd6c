"""What does not fit is named, all at once, and nothing is changed."""

from __future__ import annotations

from shard_core.testing.suites.suite import Suite


class Mismatch(Suite):
    """What does not fit is named, all at once, and nothing is changed."""
