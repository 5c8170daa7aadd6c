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

#: Keywords of torch's wrapper, and of strategies and loops elsewhere.
_REFUSED = {
    **dict.fromkeys(
        ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"),
        "gradients are averaged in full precision, which is what makes results those of one process; precision= and "
        "no_backward_sync save traffic",
    ),
    "accumulate_grad_batches": "the loop accumulates, with no_backward_sync",
    "device_ids": "a rank's device follows from accelerator, devices and parallel_devices",
    "device_mesh": "all ranks average with one another; strategies 'hsdp' and 'tp' have meshes",
    "gradient_clip_val": "the loop clips, with clip_gradients_norm",
    "mixed_precision": "the argument is called precision, such as precision='bf16-mixed'",
    "precision_plugin": "the argument is called precision",
    "process_group": "a group of some ranks would leave out the others, whose checkpoints and norms count",
    "start_method": "launch() starts ranks as new processes",
    "sync_batchnorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) does it, before setup",
}

DDP = StrategyInfo(
    name="ddp",
    summary="a whole copy of the model on every rank, gradients averaged while backward runs",
    factory="shard_core.strategies.ddp:DDPStrategy",
    capabilities=_WHOLE_PARAMETERS,
    precisions=_PRECISIONS,
    devices=("cpu", "cuda"),
    options=options_of(DDPConfig),
    refused=_REFUSED,
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
