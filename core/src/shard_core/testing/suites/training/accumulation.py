"""Gradients of several micro-batches add up to that of one large batch."""

from __future__ import annotations

from shard_core.testing.suites.suite import Suite


class Accumulation(Suite):
    """Gradients of several micro-batches add up to that of one large batch."""
