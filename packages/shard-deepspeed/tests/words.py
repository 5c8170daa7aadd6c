"""A model whose parts users add to, exchange and resize, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shard_core import SetupError

WORDS = torch.tensor([[1, 2, 3]])


class Words(nn.Module):
    """An embedding and a head, between which users put what they like."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6)
        self.extra: Any = None

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Compute scores of the next word."""
        hidden = self.first(self.embed(words))
        hidden = hidden if self.extra is None else self.extra(hidden)
        return torch.as_tensor(self.head(hidden * getattr(self.first, "scale", 1)))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer."""
    return torch.optim.SGD(module.parameters(), lr=0.1)


def refused_step(
    strategy: Any, model: Any, optimizer: torch.optim.Optimizer, change: Callable[[Any], None], when: str
) -> tuple[str, str]:
    """Change a module at some time of a step; return when that was refused, and how."""
    own = strategy.unwrap(model)
    at = "forward"
    try:
        if when == "forward":
            change(own)
        loss = model(WORDS).square().mean()
        at = "backward"
        if when == "backward":
            change(own)
        strategy.backward(loss, model)
        at = "step"
        if when == "step":
            change(own)
        strategy.optimizer_step(optimizer)
    except SetupError as error:
        return at, str(error)
    return "never", ""
