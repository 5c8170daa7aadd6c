"""What ``zero1`` says about itself; pure data."""

from __future__ import annotations

from shard_core.plugins import Capability, StrategyInfo, hookimpl, options_of
from shard_zero1.config import Zero1Config

#: A closure would see parameters that were not sent yet, an optimizer that looks across tensors only some of them.
_CAPABILITIES = (
    "CLIP_ANY_NORM CLIP_VALUE COMPILE DEFER_SYNC DENOMINATOR FP16 INFERENCE MULTIPLE_OPTIMIZERS SEVERAL_MODULES "
    "SYNC_GRADS"
)

ZERO1 = StrategyInfo(
    name="zero1",
    summary="a whole copy of the model on every rank, the optimizer's state of each parameter on one",
    factory="shard_zero1.strategy:Zero1Strategy",
    capabilities=frozenset(Capability[name] for name in _CAPABILITIES.split()),
    precisions=("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"),
    devices=("cpu", "cuda"),
    options=options_of(Zero1Config),
)


@hookimpl
def shard_strategy(name: str) -> StrategyInfo | None:
    return ZERO1 if name == ZERO1.name else None
