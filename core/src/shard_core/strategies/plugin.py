"""The cards of the built-in strategies, in the same form as those of every backend; pure data."""

from __future__ import annotations

from shard_core.capability import Capability
from shard_core.options import options_of
from shard_core.plugins import StrategyInfo, hookimpl
from shard_core.strategies.config import DDPConfig, SingleConfig

#: Both keep whole parameters in torch's own tensors, so they lack only what shards memory out.
_WHOLE_PARAMETERS = frozenset(
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
)
_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")

SINGLE = StrategyInfo(
    name="single",
    summary="one process on one device: plain PyTorch, the reference for all others",
    factory="shard_core.strategies.single:SingleStrategy",
    capabilities=_WHOLE_PARAMETERS,
    precisions=_PRECISIONS,
    devices=("cpu", "cuda"),
    options=options_of(SingleConfig),
    max_ranks=1,
    known_as={"single_device": "it is 'single' here"},
)

DDP = StrategyInfo(
    name="ddp",
    summary="a whole copy of the model on every rank, gradients averaged while backward runs",
    factory="shard_core.strategies.ddp:DDPStrategy",
    capabilities=_WHOLE_PARAMETERS,
    precisions=_PRECISIONS,
    devices=("cpu", "cuda"),
    options=options_of(DDPConfig),
    known_as={
        **dict.fromkeys(
            ("ddp_spawn", "ddp_fork", "ddp_notebook"),
            "it is 'ddp', of which launch() starts as many ranks as devices= says",
        ),
        "dp": "it is 'ddp', with a process for each device",
        "ddp_find_unused_parameters_true": "it is 'ddp' with the option find_unused_parameters=True",
    },
)


@hookimpl
def shard_strategy(name: str) -> StrategyInfo | None:
    """Describe a built-in strategy.

    Example:
        >>> shard_strategy("single").summary
        'one process on one device: plain PyTorch, the reference for all others'
    """
    return {info.name: info for info in (SINGLE, DDP)}.get(name)
