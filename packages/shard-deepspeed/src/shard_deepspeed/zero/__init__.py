"""A module under ZeRO: how a stage lays its parameters out, and what users may do to them by hand all the same."""

from __future__ import annotations

from shard_deepspeed.zero.module import ZeroModule, is_trained

__all__ = ["ZeroModule", "is_trained"]
