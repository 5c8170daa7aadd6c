"""A resumed run goes on as if it had never stopped."""

from __future__ import annotations

from shard_core.testing.suites.suite import Suite


class Resume(Suite):
    """A resumed run goes on as if it had never stopped."""
