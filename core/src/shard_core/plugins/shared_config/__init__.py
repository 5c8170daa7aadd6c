"""The options that engines share, each declared and checked once; reaches no torch."""

from __future__ import annotations

from shard_core.plugins.shared_config.units import PreparationOptions

__all__ = ["PreparationOptions"]
