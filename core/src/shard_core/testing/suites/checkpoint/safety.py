"""A killed save and a damaged file are told from a good checkpoint."""

from __future__ import annotations

from shard_core.testing.suites.suite import Suite


class Safety(Suite):
    """A killed save and a damaged file are told from a good checkpoint."""
