"""What this backend says about its strategies; pure data."""

from __future__ import annotations

from shard_core.plugins import Capability, StrategyInfo, hookimpl, options_of
from shard_tp.config import TPConfig

#: Optimizers that look at whole matrices meet shards. META_INIT promises that no rank ever holds a model whole, and
#: on a mesh with one data rank each holds whole what no plan splits.
_LACKING = {
    Capability.ANY_OPTIMIZER,
    Capability.COMPILE,
    Capability.CPU_OFFLOAD,
    Capability.META_INIT,
}

TP = StrategyInfo(
    name="tp",
    summary="layers split over tensor-parallel ranks, all else sharded over data-parallel ranks, on one mesh",
    factory="shard_tp.strategy:TPStrategy",
    capabilities=frozenset(Capability) - _LACKING,
    precisions=("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"),
    devices=("cpu", "cuda"),
    options=options_of(TPConfig),
    known_as=dict.fromkeys(
        ("model_parallel", "tensor_parallel"), "it is 'tp' here, over fully sharded data parallelism"
    ),
)


@hookimpl
def shard_strategy(name: str) -> StrategyInfo | None:
    """Describe the strategy of this backend."""
    return TP if name == TP.name else None
