"""The options of the strategies: those that engines share, layout, and torch keywords that leave nothing to choose."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from shard_core import InvalidOption
from shard_core.plugins import LayerOptions, nearest, option
from shard_fsdp.config.layout import LayoutOptions
from shard_fsdp.config.refused_options import SingleValuedOptions

if TYPE_CHECKING:
    from torch.distributed.fsdp import StateDictType

_FORMS = ("sharded", "full")
_DEFERRABLE = ("auto", "all", "all_reduce", "nothing")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FSDPConfig(SingleValuedOptions, LayerOptions, LayoutOptions):
    """Options of ``fsdp``, ``fsdp_cpu_offload`` and ``hsdp``.

    Raises:
        InvalidOption: If a value has the wrong type, makes no sense or contradicts another.
    """

    defer_sync: Literal["auto", "all", "all_reduce", "nothing"] = option(
        "auto",
        "what no_backward_sync leaves to the last micro-batch: all, nothing, or the all_reduce between copies; 'auto': "
        "the last if there are several, else all",
    )
    state_dict_type: Literal["sharded", "full"] | StateDictType = option(
        "sharded", "the form of checkpoints unless a save names one: each rank's shards, or whole tensors (full)"
    )

    def __post_init__(self) -> None:
        """Check types and values, and convert torch's objects to our values where these mean the same."""
        for options in (LayoutOptions, LayerOptions, SingleValuedOptions):
            options.__post_init__(self)
        object.__setattr__(self, "state_dict_type", checkpoint_form(self.state_dict_type))
        if self.defer_sync not in _DEFERRABLE:
            hint = nearest(str(self.defer_sync), _DEFERRABLE) or ";"
            raise InvalidOption(f"defer_sync is {self.defer_sync!r}{hint} it can be: {', '.join(_DEFERRABLE)}.")
        if self.defer_sync == "all_reduce" and not self.has_copies:
            raise InvalidOption(
                "defer_sync is 'all_reduce', which travels between copies, and there is one copy; give 'all' or "
                "'nothing', or make copies with device_mesh."
            )


def checkpoint_form(value: Any) -> str:
    """Normalize the form of checkpoints.

    Args:
        value: What the user gave: a form, or torch's enum of state dicts.

    Returns:
        ``"sharded"`` or ``"full"``.

    Raises:
        InvalidOption: If there is no such form.

    Example:
        >>> checkpoint_form("FULL_STATE_DICT")
        'full'
    """
    name = str(getattr(value, "name", value)).removesuffix("_STATE_DICT").lower()
    if name not in _FORMS:
        raise InvalidOption(
            f"state_dict_type is {value!r}{nearest(name, _FORMS) or ';'} it can be: {', '.join(_FORMS)}."
        )
    return name
