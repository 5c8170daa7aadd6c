"""The strategies and their parts: the devices, units, sharded and full parameters, a module's tensors by name."""

from __future__ import annotations

from shard_xla.strategy.fsdp import XLAFSDPStrategy
from shard_xla.strategy.spmd import XLASPMDStrategy

__all__ = ["XLAFSDPStrategy", "XLASPMDStrategy"]
