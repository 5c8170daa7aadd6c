"""What this backend says about its strategy; pure data."""

from __future__ import annotations

from shard_core.plugins import Capability, StrategyInfo, hookimpl, options_of
from shard_template.config import TemplateConfig

TEMPLATE = StrategyInfo(
    name="template",
    summary="to fill in: what it does, in one line",
    factory="shard_template.strategy:TemplateStrategy",
    # What is not declared, core refuses: a call that asks for it raises MissingCapability.
    capabilities=frozenset(
        {
            Capability.MULTIPLE_OPTIMIZERS,
            Capability.CLIP_VALUE,
            Capability.CLIP_ANY_NORM,
            Capability.DEFER_SYNC,
            Capability.FP16,
            Capability.INFERENCE,
            Capability.CLOSURE,
            Capability.COMPILE,
            Capability.SYNC_GRADS,
            Capability.DENOMINATOR,
            Capability.ANY_OPTIMIZER,
            Capability.ENTRY_METHODS,
            Capability.SEVERAL_MODULES,
            Capability.UNFREEZE,
        }
    ),
    precisions=("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"),
    devices=("cpu", "cuda"),
    options=options_of(TemplateConfig),
)


@hookimpl
def shard_strategy(name: str) -> StrategyInfo | None:
    """Describe the strategy of this backend."""
    return TEMPLATE if name == TEMPLATE.name else None
