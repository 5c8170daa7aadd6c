"""What every part of a random program's model is, and the plainest of them."""

from __future__ import annotations

import torch
from torch import nn

LENGTH, WIDTH, VOCABULARY = 4, 8, 11


class Part(nn.Module):
    """Adds something of shape (rows, 4, 8) to what came in."""

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Compute what is added.

        Args:
            hidden: Shape (rows, 4, 8).
            tokens: Shape (rows, 4), from 0 to 10.
        """
        raise NotImplementedError


class Linear(Part):
    """A layer and a bend."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - a part's signature
        """Compute what is added."""
        return torch.tanh(self.layer(hidden))
