"""Tied, frozen and unused parameters and buffers stay what they are."""

from __future__ import annotations

from shard_core.testing.suites.suite import Suite


class Structure(Suite):
    """Tied, frozen and unused parameters and buffers stay what they are."""
