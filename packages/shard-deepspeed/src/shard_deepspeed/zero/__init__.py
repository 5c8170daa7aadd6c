"""A module under ZeRO: partitions of its parameters by stage, their gradients, and what users write by hand."""

from __future__ import annotations

from shard_deepspeed.zero.module import ZeroModule, is_trained
from shard_deepspeed.zero.trained_parameter import fill_frozen
from shard_deepspeed.zero.uneven_calls import UnevenCalls

__all__ = ["UnevenCalls", "ZeroModule", "fill_frozen", "is_trained"]
