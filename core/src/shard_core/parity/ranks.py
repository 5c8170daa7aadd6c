"""The user's model trained under a strategy, on its ranks."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shard_core.errors import InvalidOption
from shard_core.parity.batch import part_of, samples_in
from shard_core.parity.plain import Run

if TYPE_CHECKING:
    from shard_core.parity.recipe import Recipe
    from shard_core.strategy import Strategy


def run_under(strategy: Strategy, recipe: Recipe) -> tuple[Run, int]:
    """Launch a strategy's ranks and train on them.

    Args:
        strategy: Not yet started.
        recipe: Prepared.

    Returns:
        The run, and over how many data ranks the batch was split.

    Raises:
        InvalidOption: If the batch cannot be split.
        RankFailed: If a rank raised.
    """
    data_ranks, path = strategy.launch(train, recipe) or (0, "")
    samples = samples_in(recipe.batch())
    if not path:
        raise InvalidOption(
            f"the batch has {samples} samples, which do not divide over {data_ranks} data ranks; give a batch of a "
            f"multiple of {data_ranks}, or another number of --devices."
        )
    return Run(**torch.load(path, weights_only=True)), data_ranks


def train(strategy: Strategy, recipe: Recipe) -> tuple[int, str]:
    """Train on this rank's part of the batch, and write the run down on rank 0.

    Args:
        strategy: Started.
        recipe: Prepared by the process that launched.

    Returns:
        The number of data ranks, and the file with the run; empty if the batch does not divide.
    """
    place = strategy.distributed_sampler_kwargs
    rank, data_ranks = place["rank"], place["num_replicas"]
    batch = recipe.batch()
    if samples_in(batch) % data_ranks:
        return data_ranks, ""
    strategy.seed_everything(recipe.seed)
    model = recipe.model()
    optimizer = recipe.make_optimizer(model)
    module, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
    share = strategy.batch_to_device(part_of(batch, rank, data_ranks))
    run = Run(losses=[], norms=[], gradients={}, weights={})
    first = recipe.optimizer == "sgd"
    for _ in range(recipe.steps):
        loss = recipe.loss_of(module, share)
        strategy.backward(loss, module)
        norm = strategy.clip_gradients_norm(module, optimizer, math.inf, error_if_nonfinite=False)
        stepped = strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
        precise = loss.detach() if loss.dtype == torch.float64 else loss.detach().float()
        run.losses.append(float(strategy.all_reduce(precise)))
        run.norms.append(float(norm))
        if stepped and first:
            run.gradients.update(_first_gradients(strategy, optimizer))
            first = False
    for name, tensor in strategy.full_parameters(module):
        if strategy.is_global_zero:
            run.weights[name] = tensor.detach().cpu().clone()
    path = Path(recipe.folder, "run.pt")
    if strategy.is_global_zero:
        torch.save(dataclasses.asdict(run), path)
    return data_ranks, str(path)


def _first_gradients(strategy: Strategy, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Read the gradients of the first step, on any engine: they are what SGD's momentum begins with."""
    state = strategy.optimizer_state_dict(optimizer).get("state", {})
    return {name: slots["momentum_buffer"] for name, slots in state.items() if "momentum_buffer" in slots}
