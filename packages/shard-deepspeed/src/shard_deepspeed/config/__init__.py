"""The options of the strategies, and in ``unsupported`` those of DeepSpeed's that are not honoured yet."""

from __future__ import annotations

import dataclasses

from shard_core import InvalidOption
from shard_core.plugins import LayerOptions, option, refuse_other_values
from shard_deepspeed.config.loss_scale import LossScaleOptions
from shard_deepspeed.config.unsupported import UnsupportedOptions

_FLAGS = (
    "zero_optimization",
    "contiguous_gradients",
    "overlap_comm",
    "reduce_scatter",
    "zero_allow_untested_optimizer",
)
#: Options that engines share and that this one does not honour yet, each with the reason.
_LATER = {
    "activation_offload": "this backend does not move activations yet",
    "compile": "this backend does not compile yet",
}
_COUNTS = {
    **dict.fromkeys(("reduce_bucket_size", "sub_group_size"), 1),
    **dict.fromkeys(
        ("param_persistence_threshold", "prefetch_bucket_size", "max_live_parameters", "max_reuse_distance"), 0
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """Options that say what is sharded, and how it travels."""

    zero_optimization: bool = option(True, "shard at all; False is stage 0")
    stage: int = option(2, "what is sharded: 0 nothing, 1 optimizer state, 2 gradients as well, 3 parameters as well")
    contiguous_gradients: bool = option(True, "stages 1 to 3: copy gradients into one buffer as backward makes them")
    overlap_comm: bool = option(True, "stages 1 to 3: send gradients while backward still runs")
    reduce_scatter: bool = option(
        True, "stages 1 to 3: give each rank the sums of what it steps; False sums all gradients on every rank"
    )
    reduce_bucket_size: int = option(200_000_000, "stages 1 to 3: how many elements of gradients travel in one message")
    sub_group_size: int = option(1_000_000_000_000, "stage 3: how many elements of parameters stand in one buffer")
    param_persistence_threshold: int = option(
        100_000, "stage 3: parameters of up to this many elements stay whole on every rank between steps"
    )
    prefetch_bucket_size: int = option(
        50_000_000, "stage 3: how many elements of parameters are gathered ahead of the layer that needs them"
    )
    max_live_parameters: int = option(
        1_000_000_000, "stage 3: gather nothing ahead that would make more elements whole at once"
    )
    max_reuse_distance: int = option(
        1_000_000_000, "stage 3: keep parameters whole that are needed again before this many elements of others"
    )
    zero_allow_untested_optimizer: bool = option(
        True, "stages 1 to 3: take optimizers that DeepSpeed does not list as tested; False refuses them"
    )
    logging_level: int = option(30, "from which level on DeepSpeed's logger prints; 30 is warnings")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig(UnsupportedOptions, LossScaleOptions, LayerOptions, ZeroOptions):
    """Options of ``deepspeed`` and ``deepspeed_stage_1`` to ``3``.

    Raises:
        InvalidOption: If a value has the wrong type, makes no sense or cannot be honoured yet.

    Example:
        >>> DeepSpeedConfig(stage=3, param_persistence_threshold=0).zero_stage
        3
        >>> DeepSpeedConfig(partition_activations=True)
        Traceback (most recent call last):
        ...
        shard_core.errors.InvalidOption: partition_activations is True; this backend does not shard or move \
activations yet: leave it at False.
    """

    def __post_init__(self) -> None:
        """Check types and values."""
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidOption(f"{name} is {getattr(self, name)!r}; give True or False.")
        if self.stage not in (0, 1, 2, 3) or isinstance(self.stage, bool):
            raise InvalidOption(f"stage is {self.stage!r}; give 0, 1, 2 or 3.")
        if not self.zero_optimization and self.stage in (1, 3):
            raise InvalidOption(
                f"zero_optimization is False and stage is {self.stage}, which shards; leave one of them out, or give "
                "stage=0."
            )
        for name, least in _COUNTS.items():
            if not _is_count(getattr(self, name), least):
                raise InvalidOption(f"{name} is {getattr(self, name)!r}; give a number of elements from {least} up.")
        if not _is_count(self.logging_level, 0):
            raise InvalidOption(f"logging_level is {self.logging_level!r}; give a level of logging, such as 30.")
        LayerOptions.__post_init__(self)
        LossScaleOptions.__post_init__(self)
        UnsupportedOptions.__post_init__(self)
        refuse_other_values(self, _LATER)
        if self.zero_stage == 3 and not self.reduce_scatter and not self.contiguous_gradients:
            raise InvalidOption(
                "reduce_scatter and contiguous_gradients are False, and at stage 3 gradients are summed on every rank "
                "only out of one buffer; leave one of them at True."
            )

    @property
    def zero_stage(self) -> int:
        """Return the stage in effect."""
        return self.stage if self.zero_optimization else 0


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
