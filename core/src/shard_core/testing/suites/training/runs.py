"""A few steps under a strategy, as one rank saw them, and holding all ranks to the oracle."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shard_core.testing import models, oracle
from shard_core.testing.training import set_up, whole_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from shard_core.strategy import Strategy
    from shard_core.testing.strategy_under_test import Subject

BATCH = 12
"""Samples in a global batch: they divide by 1, 2 and 3 ranks, and again by 2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What one rank saw.

    Attributes:
        losses: The mean loss over its own samples, of each step.
        weights: Whole parameters and persistent buffers at the end.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]


def train(
    subject: Subject,
    model: str | Callable[[], nn.Module],
    optimizer: str | Callable[[nn.Module], torch.optim.Optimizer],
    steps: int,
) -> Run:
    """Take plain steps on this rank's share of batches.

    Args:
        subject: The strategy to train under.
        model: The name of a model of the zoo, or what builds one that takes the batches of ``"plain"``.
        optimizer: The name of an optimizer of the zoo, or what builds one.
        steps: How many.

    Returns:
        What this rank saw.
    """
    with subject.strategy() as strategy:
        ready, stepped = set_up(strategy, model, optimizer)
        batches = models.batches(model if isinstance(model, str) else "plain", steps, BATCH)
        return train_on(strategy, ready, stepped, batches)


def train_on(
    strategy: Strategy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Any, ...]],
    loss_of: Callable[[Any], torch.Tensor] | None = None,
) -> Run:
    """Take plain steps with a model that is set up.

    Args:
        strategy: What set it up.
        model: What setup returned.
        optimizer: What setup returned.
        batches: Global batches, one for each step.
        loss_of: Takes the loss from what the model returns; None where that is the loss.

    Returns:
        What this rank saw.
    """
    losses = []
    for batch in batches:
        output = model(*models.share_of(strategy, batch))
        loss = output if loss_of is None else loss_of(output)
        strategy.backward(loss, model)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses=losses, weights=whole_weights(strategy, model))


def whole_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copy all buffers of a module as this rank has them, whole, to host memory.

    Args:
        module: The user's own, without what setup put around it.

    Returns:
        The buffers by name, those that checkpoints leave out too.
    """
    whole = {name: b.full_tensor() if isinstance(b, DTensor) else b for name, b in module.named_buffers()}
    return {name: buffer.detach().cpu().clone() for name, buffer in whole.items()}


def plainly(
    model: str | Callable[[], nn.Module],
    optimizer: str | Callable[[nn.Module], torch.optim.Optimizer],
    steps: int,
    device: torch.device | str = "cpu",
) -> oracle.Trajectory:
    """Train in plain PyTorch on whole batches, as ``train`` does on shares.

    Args:
        model: As for ``train``.
        optimizer: As for ``train``.
        steps: As for ``train``.
        device: Where to train the model, which is built on the CPU.

    Returns:
        The truth, its weights on the CPU.
    """
    whole = models.batches(model if isinstance(model, str) else "plain", steps, BATCH)
    run = oracle.train(
        lambda: (models.make(model) if isinstance(model, str) else model()).to(device),
        lambda module: models.make_optimizer(optimizer, module) if isinstance(optimizer, str) else optimizer(module),
        [tuple(tensor.to(device) for tensor in batch) for batch in whole],
    )
    return dataclasses.replace(run, weights={name: tensor.cpu() for name, tensor in run.weights.items()})


def device_of(strategy: Strategy) -> torch.device:
    """Return where a strategy that is started has batches, and computes."""
    moved: torch.Tensor = strategy.batch_to_device(torch.zeros(()))
    return moved.device


def assert_like(runs: Sequence[Run], truth: oracle.Trajectory) -> None:
    """Compare the ranks' losses, averaged, and each rank's weights with the oracle's.

    Args:
        runs: What each rank saw.
        truth: The oracle's run.

    Raises:
        AssertionError: If anything differs; names the step or the parameter.
    """
    means = [sum(losses) / len(losses) for losses in zip(*(run.losses for run in runs), strict=True)]
    oracle.assert_same_numbers("the ranks' mean loss", means, truth.losses, 1e-6)
    for run in runs:
        oracle.assert_same_weights(run.weights, truth.weights, 1e-5)
