"""The strategies, and what they are made of: the process's devices, units, spread tensors, and where tensors stand."""

from __future__ import annotations

from shard_xla.strategy.fsdp import XLAFSDPStrategy
from shard_xla.strategy.spmd import XLASPMDStrategy

__all__ = ["XLAFSDPStrategy", "XLASPMDStrategy"]
