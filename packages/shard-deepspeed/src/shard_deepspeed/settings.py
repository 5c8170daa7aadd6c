"""What an engine is told, and what it says it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shard_core.errors import SetupError

if TYPE_CHECKING:
    from shard_deepspeed.config import DeepSpeedConfig


def settings(config: DeepSpeedConfig, parameter: str = "float32") -> dict[str, Any]:
    """Write the options down as DeepSpeed reads them.

    Clipping, accumulation and precision are the strategy's: the engine is told to leave them alone.

    Args:
        config: The options.
        parameter: The parameters' dtype.
    """
    stage = config.zero_stage
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": config.contiguous_gradients,
        "overlap_comm": config.overlap_comm,
        "reduce_scatter": config.reduce_scatter,
        "allgather_bucket_size": config.allgather_bucket_size,
        "reduce_bucket_size": config.reduce_bucket_size,
        "sub_group_size": config.sub_group_size,
        "stage3_param_persistence_threshold": config.param_persistence_threshold,
        # Else torch.nn.functional.linear is exchanged for the whole process.
        "memory_efficient_linear": False,
    }
    if stage in (1, 2):
        zero["compute_grad_norm"] = False
    told = {
        "train_micro_batch_size_per_gpu": _batch_size(config),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    if parameter == "bfloat16":
        told["bf16"] = {"enabled": True}
        if stage == 3:
            # Where gradients add up. At stages 1 and 2 parts do that by themselves.
            told["data_types"] = {"grad_accum_dtype": "fp32"}
    return told


def check_honoured(engine: Any, config: DeepSpeedConfig) -> None:
    """Read back what an engine does and compare it with what it was told.

    Args:
        engine: DeepSpeed's.
        config: The options.

    Raises:
        SetupError: Naming everything the engine does otherwise.
    """
    told = settings(config)["zero_optimization"]
    said: dict[str, tuple[Any, Any]] = {
        "stage": (int(engine.zero_optimization_stage()), told["stage"]),
        "contiguous_gradients": (engine.zero_contiguous_gradients(), told["contiguous_gradients"]),
        "overlap_comm": (engine.zero_overlap_comm(), told["overlap_comm"]),
        "reduce_scatter": (engine.zero_reduce_scatter(), told["reduce_scatter"]),
        "allgather_bucket_size": (engine.zero_allgather_bucket_size(), told["allgather_bucket_size"]),
        "reduce_bucket_size": (engine.zero_reduce_bucket_size(), told["reduce_bucket_size"]),
        "sub_group_size": (engine.zero_sub_group_size(), told["sub_group_size"]),
        "param_persistence_threshold": (
            engine.zero_param_persistence_threshold(),
            told["stage3_param_persistence_threshold"],
        ),
        "logging_batch_size_per_gpu": (engine.train_micro_batch_size_per_gpu(), _batch_size(config)),
        "gradient clipping": (engine.gradient_clipping(), 0.0),
        "gradient accumulation": (engine.gradient_accumulation_steps(), 1),
    }
    # What the engine hands down is what acts.
    for name in ("contiguous_gradients", "overlap_comm", "reduce_scatter", "reduce_bucket_size", "sub_group_size"):
        if hasattr(engine.optimizer, name):
            said[f"{name} of its optimizer"] = getattr(engine.optimizer, name), said[name][1]
    otherwise = [f"{name} is {is_!r}, not {asked!r}" for name, (is_, asked) in said.items() if is_ != asked]
    if otherwise:
        raise SetupError(f"DeepSpeed does otherwise than it was told: {'; '.join(otherwise)}.")


def _batch_size(config: DeepSpeedConfig) -> int:
    return 1 if config.logging_batch_size_per_gpu == "auto" else int(config.logging_batch_size_per_gpu)
