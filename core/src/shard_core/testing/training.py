"""Training a model of the zoo under a strategy, the way users do, to be held against the oracle."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shard_core.selection import get_strategy
from shard_core.testing import models
from shard_core.testing.oracle import Trajectory

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from shard_core.strategy import Strategy


def set_up(
    strategy: Strategy,
    model: str | Callable[[], torch.nn.Module],
    optimizer: str | Callable[[torch.nn.Module], torch.optim.Optimizer],
    *,
    seed: int = 0,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Build a model and its optimizer from a seed, and set both up.

    Args:
        strategy: Started.
        model: The name of a model of the zoo, or what builds one.
        optimizer: The name of an optimizer of the zoo, or what builds one over the model.
        seed: What the initial weights are drawn from.

    Returns:
        What setup returned.
    """
    strategy.seed_everything(seed)
    with strategy.module_init_context():
        built = models.make(model) if isinstance(model, str) else model()
    made = models.make_optimizer(optimizer, built) if isinstance(optimizer, str) else optimizer(built)
    ready, (stepped,) = strategy.setup_module_and_optimizers(built, [made])
    return ready, stepped


def step(strategy: Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Any, ...]) -> float:
    """Take one plain step on this rank's share of a global batch.

    Args:
        strategy: What set the two up.
        model: What setup returned.
        optimizer: What setup returned.
        batch: The global batch.

    Returns:
        The mean loss over all ranks.
    """
    loss = model(*models.share_of(strategy, batch))
    strategy.backward(loss, model)
    strategy.optimizer_step(optimizer)
    optimizer.zero_grad()
    return float(strategy.all_reduce(loss.detach()))


def whole_weights(strategy: Strategy, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy all parameters, whole, to this rank's host memory.

    Args:
        strategy: What set the model up.
        model: What setup returned.

    Returns:
        The parameters by name.
    """
    return {name: tensor.detach().cpu().clone() for name, tensor in strategy.full_parameters(model)}


def train_under(
    strategy_name: str,
    options: dict[str, Any],
    model_name: str,
    optimizer_name: str,
    *,
    steps: int = 20,
    global_batch: int = 12,
    accumulate: int = 1,
    clip: float | None = None,
    norm_type: float = 2.0,
    denominator: bool = False,
    seed: int = 0,
) -> Trajectory | None:
    """Train on this rank's share of the global batches.

    Args:
        strategy_name: What to get.
        options: For ``get_strategy``.
        model_name: A model of the zoo.
        optimizer_name: An optimizer of the zoo.
        steps: Optimizer steps.
        global_batch: Samples per micro-batch over all ranks.
        accumulate: Micro-batches per step.
        clip: The largest gradient norm, or ``None`` for no clipping.
        norm_type: Which norm.
        denominator: Sum losses and give the count to ``backward`` instead of taking means.
        seed: What the initial weights are drawn from.

    Returns:
        The run on rank 0, ``None`` elsewhere.
    """
    with get_strategy(strategy_name, **options) as strategy:
        model, optimizer = set_up(strategy, model_name, optimizer_name, seed=seed)
        batches = models.batches(model_name, steps * accumulate, global_batch, seed)
        losses, norms = [], []
        for start in range(0, len(batches), accumulate):
            micro = batches[start : start + accumulate]
            losses.append(_accumulate(strategy, model, micro, denominator=denominator))
            limit = math.inf if clip is None else clip
            norms.append(strategy.clip_gradients_norm(model, optimizer, limit, norm_type).item())
            assert strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        weights = strategy.module_state_dict(model)
        return Trajectory(losses=losses, norms=norms, weights=weights) if strategy.is_global_zero else None


def _accumulate(
    strategy: Strategy, model: torch.nn.Module, batches: list[tuple[Any, ...]], *, denominator: bool
) -> float:
    total = 0.0
    for number, batch in enumerate(batches):
        inputs, targets = models.share_of(strategy, batch)
        with strategy.no_backward_sync(model, enabled=number < len(batches) - 1):
            if denominator:
                loss = model(inputs, targets, reduction="sum")
                strategy.backward(loss, model, denominator=targets.numel())
                mean = strategy.all_reduce(loss) * strategy.world_size / batch[1].numel() / len(batches)
            else:
                loss = model(inputs, targets) / len(batches)
                strategy.backward(loss, model)
                mean = strategy.all_reduce(loss)
        total += mean.item()
    return total
