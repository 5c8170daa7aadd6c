"""What the suites about checkpoints save, and every bit of it to compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from shard_core.testing import models
from shard_core.testing.training import set_up, step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shard_core.strategy import Strategy

Bits = dict[str, torch.Tensor]

BATCH = 12


class Assorted(nn.Module):
    """All that a checkpoint must keep at once: a model with one tensor of every kind.

    It has a tied weight, a frozen layer, shapes that neither 2 nor 3 divides, parameters of one element and
    of no dimension, and buffers, of which ``shift`` stays out of checkpoints.
    """

    scale: torch.Tensor
    shift: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.middle = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5, bias=False)
        self.again.weight = self.middle.weight
        self.fixed = nn.Linear(5, 7).requires_grad_(False)
        self.last = nn.Linear(7, 3, bias=False)
        self.gain = nn.Parameter(torch.randn(1))
        self.temperature = nn.Parameter(torch.randn(()))
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("shift", torch.ones(6), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the mean squared error."""
        self.calls += 1
        hidden = torch.tanh(self.first(inputs * self.scale + self.shift))
        hidden = self.fixed(torch.tanh(self.again(self.middle(hidden)))) * self.temperature
        return functional.mse_loss(self.last(hidden) * self.gain, targets)


def samples(steps: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw global batches for ``Assorted`` and for the zoo's regressions."""
    return models.batches("plain", steps, BATCH, seed)


def trained(
    strategy: Strategy,
    model: str | Callable[[], nn.Module] = Assorted,
    optimizer: str | Callable[[nn.Module], torch.optim.Optimizer] = "adamw",
    *,
    seed: int = 0,
    steps: int = 1,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Set a model up with its optimizer and train both for some steps.

    Args:
        strategy: Started.
        model: One of the zoo's regressions by its name, or what builds one.
        optimizer: An optimizer's name, or what builds one.
        seed: What weights and batches are drawn from.
        steps: How many steps.

    Returns:
        What setup returned.
    """
    ready, stepped = set_up(strategy, model, optimizer, seed=seed)
    for batch in samples(steps, seed):
        step(strategy, ready, stepped, batch)
    return ready, stepped


def bits_of(strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> Bits:
    """Copy all that a checkpoint keeps of a model and its optimizer, whole.

    Args:
        strategy: What set the two up.
        model: What setup returned.
        optimizer: What setup returned.

    Returns:
        ``model.NAME`` on every rank; on rank 0 also ``optim.NAME.SLOT``.
    """
    found = {f"model.{name}": tensor.detach().cpu().clone() for name, tensor in strategy.full_parameters(model)}
    for name, slots in strategy.optimizer_state_dict(optimizer).get("state", {}).items():
        found |= {f"optim.{name}.{slot}": torch.as_tensor(value).cpu().clone() for slot, value in slots.items()}
    return found


def assert_same_bits(where: str, actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare tensors bit for bit; the message names the first that differs.

    Args:
        where: What became of the tensors, for the message.
        actual: The tensors to judge.
        expected: What they should be.

    Raises:
        AssertionError: If names, dtypes, shapes or values differ.
    """
    missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
    assert not missing, f"{where}, {missing} did not come back"
    assert not extra, f"{where}, there is more than was saved: {extra}"
    for name, truth in expected.items():
        mine = actual[name]
        layouts = [(tensor.dtype, tuple(tensor.shape)) for tensor in (mine, truth)]
        assert layouts[0] == layouts[1], f"{where}, {name!r} is {layouts[0]}, not {layouts[1]}"
        if not torch.equal(mine, truth):
            place = int((mine != truth).flatten().int().argmax())
            raise AssertionError(
                f"{where}, {name!r} has other bits: {mine.flatten()[place].item()!r} instead of "
                f"{truth.flatten()[place].item()!r} at element {place}"
            )
