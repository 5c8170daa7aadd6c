"""What a random program may be run with beside its strategy: options and kinds of optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_core import plugins

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Options and values that change how a strategy computes and never what, as they are written in Python.
OPTIONS: dict[str, tuple[str, ...]] = {
    "unit_bytes": ("1", "1000"),
    "reshard_after_forward": ("True", "False"),
    "activation_checkpointing": ("torch.nn.Linear",),
    "bucket_cap_mb": ("0.0001",),
    "gradient_as_bucket_view": ("False",),
    "broadcast_buffers": ("False",),
    "contiguous_gradients": ("False",),
    "overlap_comm": ("False",),
    "reduce_scatter": ("False",),
    "reduce_bucket_size": ("70",),
    "sub_group_size": ("100",),
    "param_persistence_threshold": ("0", "20"),
    "auto_wrap_policy": ("{torch.nn.Linear}",),
    "activation_checkpointing_policy": ("{torch.nn.Linear}",),
    "shard_param_on_dim_0": ("True",),
    "disable_reshard_on_root": ("False",),
}
_NEEDS_PRESET = {"sub_group_size": ("stage", 3), "param_persistence_threshold": ("stage", 3)}
"""Options that act under some names of an engine alone, and are refused under its others."""
_INSTEAD = {"auto_wrap_policy": "unit_bytes", "activation_checkpointing_policy": "activation_checkpointing"}
"""Options that say in another way what another says, which is drawn where a strategy has it."""
KINDS = ("sgd", "momentum", "nesterov", "adamw", "amsgrad", "rmsprop", "adagrad")
"""The kinds of optimizers."""
FUSED = ("sgd", "momentum", "nesterov", "adamw", "amsgrad", "adagrad")
"""Those that torch can compute in one kernel on the CPU."""


def offered(strategy: str) -> list[str]:
    """List the options of ``OPTIONS`` that a strategy has and that its name leaves open, as ``name=value``.

    Example:
        >>> offered("ddp")[0]
        'activation_checkpointing=torch.nn.Linear'
    """
    card = plugins.find(strategy)
    free = {option.name for option in card.options} - card.presets.keys()
    free -= {name for name, (preset, value) in _NEEDS_PRESET.items() if card.presets.get(preset) != value}
    free -= {name for name, other in _INSTEAD.items() if other in free}
    return [f"{name}={value}" for name, values in OPTIONS.items() if name in free for value in values]


def options_for(strategy: str, options: Sequence[str]) -> list[str]:
    """Pick from a program's options those that a strategy has: it may go on under one that has others."""
    known = offered(strategy)
    return [option for option in options if option in known]
