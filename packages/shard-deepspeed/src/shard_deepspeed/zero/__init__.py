"""A module under ZeRO: partitions of its parameters by stage, their gradients, and what users write by hand."""

from __future__ import annotations

from shard_deepspeed.zero.module import ZeroModule, is_trained
from shard_deepspeed.zero.trained_parameter import fill_frozen

__all__ = ["ZeroModule", "fill_frozen", "is_trained"]
