"""Hand-written loops on ``fully_shard`` under every combination of settings that people tune."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from raw_loops import RATE, Raw
from torch import nn
from torch.distributed.fsdp import fully_shard


@dataclasses.dataclass(frozen=True)
class Settings:
    """What can be tuned by hand.

    Attributes:
        unit: How many neighbouring blocks are gathered at once; None for all of the model at once.
        reshard: Whether whole parameters are freed between forward and backward.
        fused: Whether the optimizer is to use its fused kernel.
        prefetch: How many units are gathered ahead by name.
    """

    unit: int | None = 1
    reshard: bool = True
    fused: bool = False
    prefetch: int = 0

    def __str__(self) -> str:
        """Format the settings for a cell of a table."""
        unit = {None: "root", 1: "per block", 2: "pairs"}[self.unit]
        words = [unit, "" if self.reshard else "no reshard", "fused" if self.fused else ""]
        return ", ".join([*filter(None, words), *([f"prefetch {self.prefetch}"] if self.prefetch else [])])


PER_BLOCK = Settings()
"""What most people write: one unit per block, and defaults for all else."""


def candidates() -> list[Settings]:
    """List every combination that makes a difference."""
    flags = (True, False)
    roots = [Settings(None, reshard, fused) for reshard, fused in itertools.product(flags, flags)]
    wrapped = itertools.product((1, 2), flags, flags, (0, 1))
    return roots + [Settings(*each) for each in wrapped]


class Tuned(Raw):
    """The loop by hand."""

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        self.settings = settings
        super().__init__(module)
        fused = True if settings.fused else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=fused)

    def wrapped(self, module: nn.Module) -> Any:
        settings, units = self.settings, []
        if settings.unit is not None:
            blocks: list[Any] = list(module.blocks)
            for start in range(0, len(blocks), settings.unit):
                group = blocks[start : start + settings.unit]
                fully_shard(group, reshard_after_forward=settings.reshard)
                units.append(group)
        fully_shard(module, reshard_after_forward=None if units else settings.reshard)
        ahead = settings.prefetch
        for place, group in enumerate(units if ahead else []):
            group[0].set_modules_to_forward_prefetch([each[0] for each in units[place + 1 : place + 1 + ahead]])
            group[0].set_modules_to_backward_prefetch([each[0] for each in units[:place][::-1][:ahead]])
        return module
