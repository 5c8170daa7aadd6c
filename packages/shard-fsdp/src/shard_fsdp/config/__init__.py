"""The options of the strategies: layout, preparation, checks of their values, and torch keywords that are refused."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from shard_core import InvalidOption
from shard_core.plugins import PreparationOptions, checks, nearest, option
from shard_fsdp.config.layout import LayoutOptions
from shard_fsdp.config.refused_options import ALWAYS

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffload, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy, StateDictType

_DEFERRABLE = ("auto", "all", "all_reduce", "nothing")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FSDPConfig(PreparationOptions, LayoutOptions):
    """Options of ``fsdp``, ``fsdp_cpu_offload`` and ``hsdp``.

    Raises:
        InvalidOption: If a value has the wrong type, makes no sense or contradicts another.
    """

    cpu_offload: bool | CPUOffload | OffloadPolicy | None = option(
        None, "keep shards, gradients and optimizer state in host memory, and step them there"
    )
    mixed_precision: MixedPrecision | MixedPrecisionPolicy | None = option(
        None, "dtypes in which parameters and gradients travel and products are computed; None follows precision"
    )
    defer_sync: Literal["auto", "all", "all_reduce", "nothing"] = option(
        "auto",
        "what no_backward_sync leaves to the last micro-batch: all, nothing, or the all_reduce between copies; 'auto': "
        "the last if there are several, else all",
    )
    state_dict_type: Literal["sharded", "full"] | StateDictType = option(
        "sharded", "the form of checkpoints unless a save names one: each rank's shards, or whole tensors (full)"
    )
    limit_all_gathers: bool = option(True, "always so: memory is bounded without making the host wait")
    use_orig_params: bool = option(True, "always so: parameters keep their names and are never flattened")

    def __post_init__(self) -> None:
        """Check types and values, and convert torch's objects to our values where these mean the same."""
        LayoutOptions.__post_init__(self)
        PreparationOptions.__post_init__(self)
        object.__setattr__(self, "cpu_offload", checks.offload(self.cpu_offload))
        checks.mixed_precision(self.mixed_precision)
        object.__setattr__(self, "state_dict_type", checks.checkpoint_form(self.state_dict_type))
        if self.defer_sync not in _DEFERRABLE:
            hint = nearest(str(self.defer_sync), _DEFERRABLE) or ";"
            raise InvalidOption(f"defer_sync is {self.defer_sync!r}{hint} it can be: {', '.join(_DEFERRABLE)}.")
        if self.defer_sync == "all_reduce" and not self.has_copies:
            raise InvalidOption(
                "defer_sync is 'all_reduce', which travels between copies, and there is one copy; give 'all' or "
                "'nothing', or make copies with device_mesh."
            )
        for name, (always, reason) in ALWAYS.items():
            if getattr(self, name) is not always:
                raise InvalidOption(f"{name} is {getattr(self, name)!r}; {reason}: give {always}, or leave it out.")
