"""A model whose parts users add to, exchange and resize, and its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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
