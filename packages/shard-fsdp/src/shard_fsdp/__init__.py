"""Shard's strategy ``fsdp``: fully sharded data parallel training on torch's ``fully_shard``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shard_fsdp.config import FSDPConfig as FSDPConfig
    from shard_fsdp.strategy import FSDPStrategy as FSDPStrategy

__all__ = ["FSDPConfig", "FSDPStrategy"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package imports no torch."""
    if name == "FSDPConfig":
        from shard_fsdp.config import FSDPConfig

        return FSDPConfig
    if name == "FSDPStrategy":
        from shard_fsdp.strategy import FSDPStrategy

        return FSDPStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
