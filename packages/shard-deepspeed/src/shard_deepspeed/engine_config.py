"""The configuration of DeepSpeed's engine, and a check that the engine acts by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shard_core import SetupError
from shard_deepspeed import _versions
from shard_deepspeed.config.inert import STAGES

if TYPE_CHECKING:
    from shard_deepspeed.config import DeepSpeedConfig


def engine_config(config: DeepSpeedConfig, parameter: str = "float32") -> dict[str, Any]:
    """Write the options down as DeepSpeed reads them.

    Clipping, accumulation and precision are the strategy's: the engine's are switched off.

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
        "reduce_bucket_size": config.reduce_bucket_size,
        "sub_group_size": config.sub_group_size,
        "stage3_param_persistence_threshold": config.param_persistence_threshold,
        "stage3_prefetch_bucket_size": config.prefetch_bucket_size,
        "stage3_max_live_parameters": config.max_live_parameters,
        "stage3_max_reuse_distance": config.max_reuse_distance,
        # Else torch.nn.functional.linear is exchanged for the whole process.
        "memory_efficient_linear": False,
    }
    if stage in (1, 2):
        zero["compute_grad_norm"] = False
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,  # as for an optimizer of ours; users' are looked at before
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    if parameter == "bfloat16":
        ds_config["bf16"] = {"enabled": True}
    if parameter == "float16":
        # The strategy scales losses. Without the section stage 1 finds no finite gradient.
        ds_config["fp16"] = {"enabled": True, "loss_scale": 1.0}
    if parameter != "float32" and stage == 3:
        # Where gradients add up. At stages 1 and 2 parts do that by themselves.
        ds_config["data_types"] = {"grad_accum_dtype": "fp32"}
    return ds_config


def check_honoured(engine: Any, config: DeepSpeedConfig) -> None:
    """Compare what was asked for with the engine's parts, which act: its configuration repeats what it was given.

    Args:
        engine: DeepSpeed's.
        config: The options.

    Raises:
        SetupError: Naming everything the engine does otherwise.
    """
    acting = _versions.acting_settings(engine)
    asked = {"stage": config.zero_stage, "gradient clipping": 0.0, "gradient accumulation": 1}
    asked |= {name: getattr(config, name) for name, stages in STAGES.items() if config.zero_stage in stages}
    otherwise = [
        f"{name} is {acting[name]!r}, not {value!r}"
        for name, value in asked.items()
        if name in acting and acting[name] != value
    ]
    if otherwise:
        raise SetupError(f"DeepSpeed does otherwise than it was configured: {'; '.join(otherwise)}.")
