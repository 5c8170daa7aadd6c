"""What this backend says about its strategies, and whether they can run here; pure data and metadata."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version

from shard_core.plugins import Capability, StrategyInfo, hookimpl, options_of
from shard_xla.config import XLAFSDPConfig, XLASPMDConfig

#: What both have: modules are built on the host, and computed in float32 or bfloat16.
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
        Capability.UNFREEZE,
    }
)

FSDP = StrategyInfo(
    name="xla_fsdp",
    summary="parameters, gradients and optimizer state sharded over XLA ranks; on CPUs a development mode",
    factory="shard_xla.strategy:XLAFSDPStrategy",
    capabilities=_PROMISES | {Capability.DEFER_SYNC},
    # Upstream's wrapper shards float32 parameters and no others.
    precisions=("32-true", "bf16-mixed"),
    devices=("xla",),
    options=options_of(XLAFSDPConfig),
)

SPMD = StrategyInfo(
    name="xla_spmd",
    summary="one process whose tensors XLA spreads over all devices of the host",
    factory="shard_xla.strategy:XLASPMDStrategy",
    # Not DEFER_SYNC: the compiler reduces gradients in every backward; nobody can make it wait.
    capabilities=_PROMISES | {Capability.ANY_OPTIMIZER, Capability.ENTRY_METHODS},
    precisions=("32-true", "bf16-mixed", "bf16-true"),
    devices=("xla",),
    options=options_of(XLASPMDConfig),
    max_ranks=1,
    beyond_max_ranks="its one process drives all devices: leave devices out, and pass virtual_devices=4, say",
)


@hookimpl
def shard_strategy(name: str) -> StrategyInfo | None:
    """Describe a strategy of this backend."""
    return {info.name: info for info in (FSDP, SPMD)}.get(name)


@hookimpl
def shard_unavailable(name: str) -> str | None:
    """Return what is wrong with torch_xla, whose import fails in a way nobody understands if torch is another."""
    if name not in (FSDP.name, SPMD.name):
        return None
    torch, torch_xla = _version("torch"), _version("torch_xla")
    if torch_xla is None:
        return (
            "torch_xla is not installed; `pip install torch==2.9.0 torch_xla==2.9.0` into an environment of its own "
            "brings it together with the torch it is built for."
        )
    if torch is None or torch.release[:2] != torch_xla.release[:2]:
        fitting = ".".join(map(str, torch_xla.release[:2]))
        return (
            f"torch_xla {torch_xla} is built for torch {fitting}, and torch {torch or 'is not installed'} is here "
            f"instead; `pip install torch=={fitting}.0 torch_xla=={torch_xla}` into an environment of its own."
        )
    return None


def _version(distribution: str) -> Version | None:
    try:
        return Version(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return None
