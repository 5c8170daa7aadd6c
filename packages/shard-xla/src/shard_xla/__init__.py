"""Shard's strategies ``xla_fsdp`` and ``xla_spmd``: fully sharded data parallel training on PyTorch/XLA."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shard_xla.config import XLAFSDPConfig as XLAFSDPConfig
    from shard_xla.config import XLASPMDConfig as XLASPMDConfig
    from shard_xla.strategy import XLAFSDPStrategy as XLAFSDPStrategy
    from shard_xla.strategy import XLASPMDStrategy as XLASPMDStrategy

__all__ = ["XLAFSDPConfig", "XLAFSDPStrategy", "XLASPMDConfig", "XLASPMDStrategy"]

_HOMES = {
    "XLAFSDPConfig": "shard_xla.config",
    "XLAFSDPStrategy": "shard_xla.strategy",
    "XLASPMDConfig": "shard_xla.config",
    "XLASPMDStrategy": "shard_xla.strategy",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package imports no torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
