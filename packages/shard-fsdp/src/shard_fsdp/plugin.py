"""What this backend says about its strategies; pure data."""

from __future__ import annotations

from shard_core.capability import Capability
from shard_core.options import options_of
from shard_core.plugins import StrategyInfo, hookimpl
from shard_fsdp.config import FSDPConfig

FSDP = StrategyInfo(
    name="fsdp",
    summary="parameters, gradients and optimizer state sharded over all ranks, on torch's fully_shard",
    factory="shard_fsdp.strategy:FSDPStrategy",
    # Optimizers that look at whole matrices meet shards: torch's Adafactor and LBFGS fail on them.
    capabilities=frozenset(Capability) - {Capability.ANY_OPTIMIZER, Capability.CPU_OFFLOAD},
    precisions=("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"),
    devices=("cpu", "cuda"),
    options=options_of(FSDPConfig),
)


@hookimpl
def shard_strategy(name: str) -> StrategyInfo | None:
    """Describe the strategy of this backend."""
    return FSDP if name == FSDP.name else None
