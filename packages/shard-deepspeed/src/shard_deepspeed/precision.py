"""Precisions under DeepSpeed: the factor of float16 losses, and whether DeepSpeed takes float16 on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shard_core import InvalidOption, UnsupportedPrecision
from shard_core.backend import GradientScaler, MixedPrecision, Precision, TruePrecision
from shard_deepspeed import _versions
from shard_deepspeed.own_device import FLOAT16_ON_CPU, accelerator, allow_float16_on_cpu

if TYPE_CHECKING:
    import torch

    from shard_core.plugins import PrecisionPolicy
    from shard_deepspeed.config import DeepSpeedConfig


def scaled_precision(config: DeepSpeedConfig, precision: Precision, *, own: bool) -> Precision:
    """Return a precision whose gradient scaler, where it has one, is what the options say.

    Args:
        config: The options.
        precision: What the argument ``precision`` stands for.
        own: Whether that is an object of the user's.

    Raises:
        InvalidOption: If the options speak of a factor, and the user's object has one.
    """
    given = config.loss_scale_given
    if precision.scaler is None or (own and not given):
        return precision
    if own:
        raise InvalidOption(
            f"precision is an object that has a gradient scaler of its own, and {given[0]} is "
            f"{getattr(config, given[0])!r}; give one of the two."
        )
    kind = MixedPrecision if precision.policy.autocast else TruePrecision
    return kind(precision.policy, scaler_of(config, precision.policy))


def scaler_of(config: DeepSpeedConfig, policy: PrecisionPolicy) -> GradientScaler:
    """Make the gradient scaler the options say.

    Args:
        config: The options.
        policy: Of a precision that scales losses.

    Raises:
        InvalidOption: If the least factor is more than the first.
    """
    if config.loss_scale:
        return GradientScaler(factor=float(config.loss_scale), growth_factor=1.0, backoff_factor=1.0)
    power = config.initial_scale_power
    if power is None:  # a loss in float16 has a gradient in float16, which holds no more
        power = 16 if policy.autocast else 15
    if config.min_loss_scale is not None and config.min_loss_scale > 2.0**power:
        raise InvalidOption(
            f"min_loss_scale is {config.min_loss_scale!r}, and the factor begins at 2 to the power of {power}, which "
            "is less; give initial_scale_power a greater number."
        )
    chosen: dict[str, Any] = {
        "growth_interval": config.loss_scale_window,
        "hysteresis": config.hysteresis,
        "min_factor": config.min_loss_scale,
    }
    return GradientScaler(factor=2.0**power, **{name: value for name, value in chosen.items() if value is not None})


def check_float16(device: torch.device) -> None:
    """Check that DeepSpeed trains parameters in float16 on a device.

    Args:
        device: This rank's.

    Raises:
        UnsupportedPrecision: If it does not.
    """
    _versions.import_deepspeed(device.type)
    if device.type == "cpu":
        allow_float16_on_cpu()
    if not accelerator().is_fp16_supported():
        raise UnsupportedPrecision(
            f"DeepSpeed does not train float16 parameters on this {device.type.upper()}, which it says has no "
            "instructions for them; take '16-mixed' or 'bf16-true', or a CUDA device; tests without one set "
            f"{FLOAT16_ON_CPU}=1 in the environment, where torch computes in float16 all the same."
        )
