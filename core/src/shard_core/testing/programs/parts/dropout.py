"""Dropout, whose masks a device with a generator of its own draws by itself: they are shown, and drawn again."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from shard_core.testing.programs.parts.part import Linear

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHARE = 0.4
"""What is dropped."""
_SIGMAS = 6.0
"""By how many standard deviations the share of one mask may be another, which happens once in 500 million masks."""
_TELLING = 32
"""Elements of which two masks are alike by chance once in a thousand million times."""


class Masks:
    """What dropout keeps, in the order in which it is drawn.

    Attributes:
        shown: What was drawn since it was last taken, on devices that have generators of their own.
        given: What is to be drawn next instead of masks of the CPU's generator.
    """

    def __init__(self) -> None:
        self.shown: list[torch.Tensor] = []
        self.given: list[torch.Tensor] = []

    def take(self) -> list[torch.Tensor]:
        """Return what was drawn, in host memory, and begin anew."""
        taken, self.shown = [mask.cpu() for mask in self.shown], []
        return taken


MASKS = Masks()
"""Those of this process: a rank's, or the oracle's of the rank whose turn it is."""


class Dropout(Linear):
    """A layer, a bend and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(SHARE)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Compute what is added."""
        out = super().forward(hidden, tokens)
        if self.training and MASKS.given:
            mask = MASKS.given.pop(0)
            MASKS.shown.append(mask)
            return out * mask / (1 - SHARE)
        dropped: torch.Tensor = self.dropout(out)
        if self.training and dropped.device.type != "cpu":
            MASKS.shown.append(dropped.detach() != 0)
        return dropped


def why_improper(masks: Mapping[int, Sequence[torch.Tensor]], before: Sequence[torch.Tensor] = ()) -> str:
    """Return what is wrong with masks that ranks drew of their own in one operation; nothing if all is well.

    Each keeps about its share, none is drawn twice, and ranks that see different data draw different ones.

    Args:
        masks: What each data rank's dropout has kept, in the order in which it was drawn.
        before: What was drawn since generators were last seeded or restored.

    Example:
        >>> why_improper({0: [torch.ones(8, 8, dtype=torch.bool)]})
        'data rank 0 keeps 100 % where 60 % are to be kept'
    """
    drawn = [(rank, mask) for rank, each in masks.items() for mask in each if mask.numel()]
    for rank, mask in drawn:
        kept = mask.double().mean().item()
        if abs(kept - (1 - SHARE)) > _SIGMAS * math.sqrt(SHARE * (1 - SHARE) / mask.numel()):
            return f"data rank {rank} keeps {kept:.0%} where {1 - SHARE:.0%} are to be kept".replace("%", " %")
    for (rank, mask), (other, another) in itertools.combinations(drawn, 2):
        if mask.numel() >= _TELLING and torch.equal(mask, another):
            return f"data ranks {rank} and {other} draw the same mask" if rank != other else f"data rank {rank} repeats"
    for rank, mask in drawn:
        if mask.numel() >= _TELLING and any(torch.equal(mask, earlier) for earlier in before):
            return f"data rank {rank} draws a mask again"
    return ""
