"""What this backend says about its strategies; pure data."""

from __future__ import annotations

from shard_core.plugins import Capability, StrategyInfo, hookimpl, options_of
from shard_tp.config import TPConfig

#: Not ANY_OPTIMIZER: those that look at whole matrices meet shards. Not META_INIT, by which no rank ever holds a model
#: whole: on a mesh with one data rank each holds whole what no plan splits.
_CAPABILITIES = frozenset(
    {
        Capability.MULTIPLE_OPTIMIZERS,
        Capability.CLIP_VALUE,
        Capability.CLIP_ANY_NORM,
        Capability.DEFER_SYNC,
        Capability.FP16,
        Capability.INFERENCE,
        Capability.CLOSURE,
        Capability.SYNC_GRADS,
        Capability.DENOMINATOR,
        Capability.ENTRY_METHODS,
        Capability.SEVERAL_MODULES,
        Capability.UNFREEZE,
    }
)

TP = StrategyInfo(
    name="tp",
    summary="layers split over tensor-parallel ranks, all else sharded over data-parallel ranks, on one mesh",
    factory="shard_tp.strategy:TPStrategy",
    capabilities=_CAPABILITIES,
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
