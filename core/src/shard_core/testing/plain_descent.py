"""The gradient a strategy steps with, read from outside: by how much plain descent lowers each weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from shard_core.testing import models
from shard_core.testing.training import whole_weights

if TYPE_CHECKING:
    from shard_core.strategy import Strategy

_SLOPE = 1.0


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer whose step is the gradient itself.

    Args:
        module: What it steps.
    """
    return torch.optim.SGD(module.parameters(), lr=_SLOPE)


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the gradients of a plain module.

    Args:
        module: Its backward has run.

    Returns:
        The gradients by name.
    """
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def take_step(strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Step, and return the gradients that were stepped with.

    Args:
        strategy: What set the two up.
        model: What setup returned; its backwards have run.
        optimizer: Made by ``make_optimizer``.

    Returns:
        The gradients by name, whole, on every rank; exact but for the rounding of the weights.
    """
    before = whole_weights(strategy, model)
    strategy.optimizer_step(optimizer)
    optimizer.zero_grad()
    after = whole_weights(strategy, model)
    return {name: (weight - after[name]) / _SLOPE for name, weight in before.items()}


def is_last_data_rank(strategy: Strategy) -> bool:
    """Return whether this rank sees the last part of the data.

    Args:
        strategy: Started.
    """
    data = strategy.distributed_sampler_kwargs
    return bool(data["rank"] == data["num_replicas"] - 1)


class Fragile(nn.Module):
    """A small regression one of whose gradients can be spoiled while all others stay finite.

    The parameter it belongs to has one element: sharded, it stands on one rank alone, and no other rank
    sees the spoiled gradient by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, spoil: float = 0.0) -> torch.Tensor:
        """Compute the mean squared error; ``spoil`` is added to the gradient of ``gain``."""
        predicted = self.second(torch.tanh(self.first(inputs))) * self.gain
        loss = functional.mse_loss(predicted, targets)
        return loss + spoil * self.gain.sum()


def spoiled_loss(strategy: Strategy, model: nn.Module, batch: tuple[Any, ...], spoil: float) -> torch.Tensor:
    """Compute a ``Fragile``'s loss on this rank's share, spoiled where the last part of the data is.

    Args:
        strategy: What set the model up.
        model: What setup returned.
        batch: The global batch.
        spoil: What the last data rank adds to one gradient.

    Returns:
        The loss.
    """
    loss: torch.Tensor = model(*models.share_of(strategy, batch), spoil=spoil if is_last_data_rank(strategy) else 0.0)
    return loss
