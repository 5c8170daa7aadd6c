"""The options of the strategies of this package."""

from __future__ import annotations

import dataclasses

from shard_core.errors import InvalidOption
from shard_core.options import option
from shard_deepspeed.config.later import LaterOptions

_FLAGS = (
    "zero_optimization",
    "contiguous_gradients",
    "overlap_comm",
    "reduce_scatter",
)
_COUNTS = {"allgather_bucket_size": 2, "reduce_bucket_size": 1, "sub_group_size": 1, "param_persistence_threshold": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """Options that say what is sharded, and how it travels."""

    zero_optimization: bool = option(True, "shard at all; False is stage 0")
    stage: int = option(2, "what is sharded: 0 nothing, 1 optimizer state, 2 gradients as well, 3 parameters as well")
    contiguous_gradients: bool = option(True, "copy gradients into one buffer as backward makes them")
    overlap_comm: bool = option(True, "send gradients while backward still runs")
    reduce_scatter: bool = option(True, "send gradients by the ranks that step them, not all of them alike")
    allgather_bucket_size: int = option(200_000_000, "how many elements of parameters travel in one message")
    reduce_bucket_size: int = option(200_000_000, "how many elements of gradients travel in one message")
    sub_group_size: int = option(1_000_000_000_000, "stage 3: how many elements of parameters stand in one buffer")
    param_persistence_threshold: int = option(
        100_000, "stage 3: parameters of up to this many elements stay whole on every rank between steps"
    )
    logging_batch_size_per_gpu: int | str = option(
        "auto", "samples in a rank's micro-batch, for DeepSpeed's own reports of speed; auto is 1"
    )
    logging_level: int = option(30, "from which level on DeepSpeed's logger prints; 30 is warnings")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig(LaterOptions, ZeroOptions):
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
        if self.allgather_bucket_size % 2:
            raise InvalidOption(
                f"allgather_bucket_size is {self.allgather_bucket_size!r}; DeepSpeed wants an even number."
            )
        if self.logging_batch_size_per_gpu != "auto" and not _is_count(self.logging_batch_size_per_gpu, 1):
            raise InvalidOption(
                f"logging_batch_size_per_gpu is {self.logging_batch_size_per_gpu!r}; give a number of samples, or "
                "'auto'."
            )
        if not _is_count(self.logging_level, 0):
            raise InvalidOption(f"logging_level is {self.logging_level!r}; give a level of logging, such as 30.")
        super().__post_init__()

    @property
    def zero_stage(self) -> int:
        """The stage that holds."""
        return self.stage if self.zero_optimization else 0


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
