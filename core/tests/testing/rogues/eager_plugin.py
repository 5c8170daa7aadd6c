"""A plugin that imports torch before anything of the strategy is asked for."""

from __future__ import annotations

import torch

from rogues.plugin import shard_strategy

__all__ = ["shard_strategy", "torch"]
