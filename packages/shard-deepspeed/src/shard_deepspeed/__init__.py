"""Shard's strategies ``deepspeed`` and ``deepspeed_stage_1`` to ``3``: data parallel training with DeepSpeed's ZeRO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shard_deepspeed.config import DeepSpeedConfig as DeepSpeedConfig
    from shard_deepspeed.strategy import DeepSpeedStrategy as DeepSpeedStrategy

__all__ = ["DeepSpeedConfig", "DeepSpeedStrategy"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package imports no torch."""
    if name == "DeepSpeedConfig":
        from shard_deepspeed.config import DeepSpeedConfig

        return DeepSpeedConfig
    if name == "DeepSpeedStrategy":
        from shard_deepspeed.strategy import DeepSpeedStrategy

        return DeepSpeedStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
