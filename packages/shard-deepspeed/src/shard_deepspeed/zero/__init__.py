"""A module under ZeRO: partitions of its parameters by stage, their gradients, and what users write by hand."""

from __future__ import annotations

from shard_deepspeed.zero.module import ZeroModule, is_trained

__all__ = ["ZeroModule", "is_trained"]
