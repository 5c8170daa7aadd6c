"""A model with a parameter that has no dimension."""

import torch
from torch import nn


class Scaled(nn.Module):
    """Two layers, and a factor without a dimension between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.factor = nn.Parameter(torch.tensor(1.3))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.second(torch.tanh(self.first(inputs)) * self.factor), targets)
