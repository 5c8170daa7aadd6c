"""Options that were given and do nothing, as the stage, the precision or another option has it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shard_deepspeed.config import DeepSpeedConfig

#: At which stages DeepSpeed looks at an option; at the others it says nothing and does without.
STAGES = {
    **dict.fromkeys(
        (
            *("contiguous_gradients", "overlap_comm", "reduce_scatter", "reduce_bucket_size"),
            "zero_allow_untested_optimizer",
        ),
        (1, 2, 3),
    ),
    **dict.fromkeys(
        (
            *("sub_group_size", "param_persistence_threshold"),
            *("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance"),
        ),
        (3,),
    ),
}


def inert_options(config: DeepSpeedConfig, *, scaled: bool) -> dict[str, str]:
    """List the options that were given and do nothing, each with the reason.

    Args:
        config: All options; what is at its default was not given.
        scaled: Whether the precision has the loss scaled.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    found = {}
    for name, stages in STAGES.items():
        if getattr(config, name) != defaults[name] and config.zero_stage not in stages:
            acts = "stage 3 alone" if stages == (3,) else "stages 1, 2 and 3"
            found[name] = f"at stage {config.zero_stage}: it acts at {acts}"
    if not scaled:
        found |= dict.fromkeys(
            config.loss_scale_given, "in a precision that scales no loss: '16-mixed' and '16-true' do"
        )
    elif config.loss_scale:
        found |= dict.fromkeys(config.adaptive_given, "beside loss_scale, which fixes the factor")
    return found
