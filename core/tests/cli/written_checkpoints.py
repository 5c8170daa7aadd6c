"""Checkpoints that the strategy ``single`` writes, for verbs to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from shard_core import get_strategy


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs))


def write(run: Path | str, *steps: int, **values: Any) -> None:
    """Train, and save at some steps into ``run/step-N``."""
    with get_strategy("single", accelerator="cpu") as strategy:
        module: Any = Tied()
        bias, weight = module.first.bias, module.first.weight
        optimizer = torch.optim.AdamW([{"params": [weight]}, {"params": [bias], "lr": 0.5}])
        module, (optimizer,) = strategy.setup_module_and_optimizers(module, [optimizer])
        for step in range(1, max(steps) + 1):
            strategy.backward(module(torch.ones(2, 4)).sum(), module)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            if step in steps:
                state = {"net": module, "adam": optimizer, "step": step, **values}
                strategy.save_checkpoint(f"{run}/step-{step}", state)
