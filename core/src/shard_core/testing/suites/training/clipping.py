"""Norms are those of the whole gradient, and clipping works as plain PyTorch's."""

from __future__ import annotations

from shard_core.testing.suites.suite import Suite


class Clipping(Suite):
    """Norms are those of the whole gradient, and clipping works as plain PyTorch's."""
