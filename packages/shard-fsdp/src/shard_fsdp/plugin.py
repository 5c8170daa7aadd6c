"""What this backend says about its strategies; pure data."""

from __future__ import annotations

from typing import Any

from shard_core.plugins import Capability, StrategyInfo, hookimpl, options_of
from shard_fsdp.config import FSDPConfig
from shard_fsdp.config.refused_options import REFUSED

#: Not ANY_OPTIMIZER: those that look at whole matrices meet shards; torch's Adafactor and LBFGS fail on them.
_CAPABILITIES = frozenset(
    {
        Capability.MULTIPLE_OPTIMIZERS,
        Capability.CLIP_VALUE,
        Capability.CLIP_ANY_NORM,
        Capability.DEFER_SYNC,
        Capability.FP16,
        Capability.META_INIT,
        Capability.INFERENCE,
        Capability.CLOSURE,
        Capability.COMPILE,
        Capability.SYNC_GRADS,
        Capability.DENOMINATOR,
        Capability.CPU_OFFLOAD,
        Capability.ENTRY_METHODS,
        Capability.SEVERAL_MODULES,
        Capability.UNFREEZE,
    }
)


_KNOWN_AS = {
    "fsdp": dict.fromkeys(
        ("fsdp2", "fsdp_native", "fully_shard", "fully_sharded", "ddp_fully_sharded"),
        "it is 'fsdp' here, on torch's fully_shard",
    ),
    "fsdp_cpu_offload": dict.fromkeys(("fsdp_offload", "fsdp_native_full_shard_offload"), "it is 'fsdp_cpu_offload'"),
    "hsdp": {"hybrid_shard": "it is 'hsdp' here"},
}


def _info(name: str, summary: str, **presets: Any) -> StrategyInfo:
    return StrategyInfo(
        name=name,
        summary=summary,
        factory="shard_fsdp.strategy:FSDPStrategy",
        capabilities=_CAPABILITIES,
        precisions=("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"),
        devices=("cpu", "cuda"),
        options=options_of(FSDPConfig),
        presets=presets,
        refused=REFUSED,
        known_as=_KNOWN_AS[name],
    )


FSDP = _info("fsdp", "parameters, gradients and optimizer state sharded over all ranks, on torch's fully_shard")
STRATEGIES = {
    info.name: info
    for info in (
        FSDP,
        _info("fsdp_cpu_offload", "as `fsdp`, with the shards in host memory and stepped there", cpu_offload=True),
        _info(
            "hsdp", "as `fsdp` within each host, with a copy of the shards on every host", device_mesh=("auto", "auto")
        ),
    )
}


@hookimpl
def shard_strategy(name: str) -> StrategyInfo | None:
    """Describe a strategy of this backend."""
    return STRATEGIES.get(name)
