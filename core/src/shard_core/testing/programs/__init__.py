"""Random training programs: each is run under a strategy and in plain PyTorch, and compared after every operation."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shard_core.testing.programs.grammar import draw
    from shard_core.testing.programs.judgement import Judgement, judge
    from shard_core.testing.programs.model import (
        Model,
        Stubborn,
        batch,
        contrast_of,
        evaluate,
        fed_back,
        loss_of,
        parameters_of,
        tensors_of,
    )
    from shard_core.testing.programs.observation import (
        failing,
        fails,
        interrupted,
        print_shown,
        refused,
        state,
        unlaunched,
    )
    from shard_core.testing.programs.program import Program
    from shard_core.testing.programs.shrinking import shrink
    from shard_core.testing.programs.writing.script import script_of

__all__ = [
    "Judgement",
    "Model",
    "Program",
    "Stubborn",
    "batch",
    "contrast_of",
    "draw",
    "evaluate",
    "failing",
    "fails",
    "fed_back",
    "interrupted",
    "judge",
    "loss_of",
    "parameters_of",
    "print_shown",
    "refused",
    "script_of",
    "shrink",
    "state",
    "tensors_of",
    "unlaunched",
]

_HOMES = {
    "grammar": ("draw",),
    "judgement": ("Judgement", "judge"),
    "observation": ("failing", "fails", "interrupted", "print_shown", "refused", "state", "unlaunched"),
    "model": (
        "Model",
        "Stubborn",
        "batch",
        "contrast_of",
        "evaluate",
        "fed_back",
        "loss_of",
        "parameters_of",
        "tensors_of",
    ),
    "program": ("Program",),
    "writing.script": ("script_of",),
    "shrinking": ("shrink",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
