"""The options that engines share, each declared and checked once; reaches no torch."""

from __future__ import annotations

from shard_core.plugins.shared_config.layers import LayerOptions
from shard_core.plugins.shared_config.single_valued import refuse_other_values
from shard_core.plugins.shared_config.units import FullyShardOptions

__all__ = ["FullyShardOptions", "LayerOptions", "refuse_other_values"]
