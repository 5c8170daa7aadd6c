"""Every declared precision has its dtypes, and a skipped step is skipped by all ranks."""

from __future__ import annotations

from shard_core.testing.suites.suite import Suite


class Precisions(Suite):
    """Every declared precision has its dtypes, and a skipped step is skipped by all ranks."""
