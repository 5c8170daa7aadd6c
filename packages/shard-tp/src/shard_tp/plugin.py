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

#: Keywords of torch's own functions, and of strategies elsewhere.
_REFUSED = {
    "device_mesh": "the mesh has the axes data and tensor, whose sizes are data_parallel_size and tensor_parallel_size",
    "limit_all_gathers": "memory is bounded without it",
    "parallelize_plan": "the option is called plan",
    "process_group": "a group of some ranks would leave out the others, whose checkpoints and norms count",
    "state_dict_type": "the option is called save_distributed_checkpoint; save_checkpoint takes state_dict_type, too",
    "sync_module_states": "all ranks start from rank 0's values in any case",
    "tp_mesh": "the mesh has the axes data and tensor, whose sizes are data_parallel_size and tensor_parallel_size",
    "use_orig_params": "every parameter keeps its own name in any case",
}

TP = StrategyInfo(
    name="tp",
    summary="layers split over tensor-parallel ranks, all else sharded over data-parallel ranks, on one mesh",
    factory="shard_tp.strategy:TPStrategy",
    capabilities=_CAPABILITIES,
    precisions=("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"),
    devices=("cpu", "cuda"),
    options=options_of(TPConfig),
    refused=_REFUSED,
    known_as=dict.fromkeys(
        ("model_parallel", "tensor_parallel"), "it is 'tp' here, over fully sharded data parallelism"
    ),
)


@hookimpl
def shard_strategy(name: str) -> StrategyInfo | None:
    """Describe the strategy of this backend."""
    return TP if name == TP.name else None
