"""Every sample is seen by one data rank, and all ranks take equally many steps."""

from __future__ import annotations

from shard_core.testing.suites.suite import Suite


class Data(Suite):
    """Every sample is seen by one data rank, and all ranks take equally many steps."""
