"""What this backend says about its strategies; pure data."""

from __future__ import annotations

import importlib.metadata

from shard_core.plugins import Capability, PrecisionPolicy, StrategyInfo, hookimpl, options_of
from shard_deepspeed.config import DeepSpeedConfig

#: The versions of DeepSpeed that ``_versions.py`` was checked on.
_CHECKED = "0.19."

#: What all stages have. Not ANY_OPTIMIZER: parameters are partitioned flat, anywhere. Not UNFREEZE: what is frozen at
#: first has no place among what is stepped. From stage 2 on gradients are sharded as soon as they are made; at stage 3
#: only a module's forward gathers its parameters.
_PROMISES = frozenset(
    {
        Capability.MULTIPLE_OPTIMIZERS,
        Capability.CLIP_VALUE,
        Capability.CLIP_ANY_NORM,
        Capability.INFERENCE,
        Capability.CLOSURE,
        Capability.SYNC_GRADS,
        Capability.DENOMINATOR,
        Capability.SEVERAL_MODULES,
        Capability.FP16,
    }
)
_WHOLE_PARAMETERS = _PROMISES | {Capability.ENTRY_METHODS}


def _over_float32(name: str, dtype: str, *, scaled: bool) -> PrecisionPolicy:
    """Return a row whose parameters have a copy in float32, which optimizers step; micro-batches add up in it, too."""
    return PrecisionPolicy(
        name=name,
        parameter=dtype,
        compute=dtype,
        reduce=dtype,
        accumulate="float32",
        optimizer="float32",
        buffer=dtype,
        scaled=scaled,
    )


_POLICIES = {
    policy.name: policy
    for policy in (
        _over_float32("bf16-true", "bfloat16", scaled=False),
        _over_float32("16-true", "float16", scaled=True),
    )
}


_KNOWN_AS = {
    "zero": "its stages are 'deepspeed_stage_1', 'deepspeed_stage_2' and 'deepspeed_stage_3'",
    **{
        word: f"it is 'deepspeed_stage_{stage}'"
        for stage in (1, 2, 3)
        for word in (f"zero{stage}", f"zero_{stage}", f"zero_stage_{stage}")
    },
    **dict.fromkeys(
        ("deepspeed_stage_2_offload", "deepspeed_stage_3_offload", "deepspeed_stage_3_offload_nvme"),
        "offloading by DeepSpeed is not there yet; 'fsdp_cpu_offload' of shard-fsdp keeps parameters and optimizer "
        "state in host memory",
    ),
}


#: Keywords that engines share which shard by units of the model.
_REFUSED = {
    **dict.fromkeys(
        ("auto_wrap_policy", "unit_bytes", "forward_prefetch", "backward_prefetch", "reshard_after_forward"),
        "stages shard in buckets and not by units of the model: see stage, reduce_bucket_size and, at stage 3, "
        "param_persistence_threshold",
    ),
    **dict.fromkeys(
        ("ignored_modules", "ignored_states"),
        "every parameter that is trained is partitioned; freeze what is to stay as it is",
    ),
    "mixed_precision": "the argument is called precision",
    "param_init_fn": "modules are built in module_init_context() or on a device",
}


def _info(name: str, summary: str, capabilities: frozenset[Capability], **presets: int) -> StrategyInfo:
    return StrategyInfo(
        name=name,
        summary=summary,
        factory="shard_deepspeed.strategy:DeepSpeedStrategy",
        capabilities=capabilities,
        precisions=("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"),
        devices=("cpu", "cuda"),
        options=options_of(DeepSpeedConfig),
        presets=presets,
        policies=_POLICIES,
        refused=_REFUSED,
        known_as=_KNOWN_AS if name == "deepspeed" else {},
    )


DEEPSPEED = _info("deepspeed", "DeepSpeed's ZeRO at the stage that option stage says", _PROMISES)
STRATEGIES = {
    info.name: info
    for info in (
        DEEPSPEED,
        _info(
            "deepspeed_stage_1",
            "optimizer state sharded over all ranks, by DeepSpeed's ZeRO stage 1",
            _WHOLE_PARAMETERS | {Capability.DEFER_SYNC},
            stage=1,
            zero_optimization=True,
        ),
        _info(
            "deepspeed_stage_2",
            "optimizer state and gradients sharded over all ranks, by DeepSpeed's ZeRO stage 2",
            _WHOLE_PARAMETERS,
            stage=2,
            zero_optimization=True,
        ),
        _info(
            "deepspeed_stage_3",
            "optimizer state, gradients and parameters sharded over all ranks, by DeepSpeed's ZeRO stage 3",
            _PROMISES,
            stage=3,
            zero_optimization=True,
        ),
    )
}


@hookimpl
def shard_strategy(name: str) -> StrategyInfo | None:
    """Describe a strategy of this backend."""
    return STRATEGIES.get(name)


@hookimpl
def shard_unavailable(name: str) -> str | None:
    """Return what of DeepSpeed is lacking, from metadata alone."""
    if name not in STRATEGIES:
        return None
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return "DeepSpeed is not installed; `pip install 'deepspeed>=0.19.8,<0.20'` brings it."
    if not found.startswith(_CHECKED):
        return (
            f"DeepSpeed {found} is installed, and this package was checked on {_CHECKED}x alone, of which it uses more "
            "than is documented; `pip install 'deepspeed>=0.19.8,<0.20'` brings one."
        )
    return None
