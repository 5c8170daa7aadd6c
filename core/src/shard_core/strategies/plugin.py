"""The cards of the built-in strategies, in the same form as those of every backend; pure data."""

from __future__ import annotations

from shard_core.capability import Capability
from shard_core.options import options_of
from shard_core.plugins import StrategyInfo, hookimpl
from shard_core.strategies.config import DDPConfig, SingleConfig

_UNSHARDED = frozenset(Capability) - {Capability.META_INIT, Capability.CPU_OFFLOAD}
_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")

SINGLE = StrategyInfo(
    name="single",
    summary="one process on one device: plain PyTorch, the reference for all others",
    factory="shard_core.strategies.single:SingleStrategy",
    capabilities=_UNSHARDED,
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
    # DistributedDataParallel averages gradients of what ran through its forward, and was to be trained at setup.
    capabilities=_UNSHARDED - {Capability.ENTRY_METHODS, Capability.UNFREEZE},
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
