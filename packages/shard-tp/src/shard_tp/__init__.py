"""Shard's strategy ``tp``: fully sharded data parallelism times tensor parallelism on one mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shard_tp.config import TPConfig as TPConfig
    from shard_tp.strategy import TPStrategy as TPStrategy

__all__ = ["TPConfig", "TPStrategy"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package imports no torch."""
    if name == "TPConfig":
        from shard_tp.config import TPConfig

        return TPConfig
    if name == "TPStrategy":
        from shard_tp.strategy import TPStrategy

        return TPStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
