"""One leg of a walk: load a checkpoint under some strategy, note every bit of it, train on, save, and go on."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, TensorDataset

from shard_core import Strategy, get_strategy
from shard_core.testing import models

STEPS, BATCH = 2, 12
EPOCH_STEPS = 5
HALF_PERIOD = 6
LEARNING_RATE_BEFORE_LOADING = 123.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leg:
    """Where a leg begins and ends.

    Attributes:
        seed: What weights and random numbers are drawn from, in vain where a checkpoint is loaded.
        load: The checkpoint it begins with.
        save: Where it leaves one.
        steps: How many it takes before it saves.
        further: How many it takes after that, as if it had never been saved.
        form: In which form it saves.
    """

    seed: int = 0
    load: Path | None = None
    save: Path | None = None
    steps: int = STEPS
    further: int = 0
    form: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
    """What was seen on some steps.

    Attributes:
        drawn: Random numbers of this rank before the first.
        samples: Which samples all ranks trained on, by step.
        losses: The loss over all ranks, by step.
    """

    drawn: dict[str, float]
    samples: list[list[int]]
    losses: list[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notes:
    """What was seen on a leg by one rank.

    Attributes:
        step: The step that stood in the checkpoint.
        loaded: Every tensor right after loading; empty where nothing was loaded.
        taken: The steps before saving.
        left: Every tensor when it was saved.
        further: The steps after saving.
        data_ranks: The ranks' places among those that see different data.
    """

    step: int
    loaded: dict[str, torch.Tensor]
    taken: Stretch
    left: dict[str, torch.Tensor]
    further: Stretch
    data_ranks: list[int]


def go_under(name: str, options: dict[str, Any], leg: Leg) -> Notes:
    """Run a leg under a strategy, on every rank of a running world."""
    with get_strategy(name, **options) as strategy:
        return go(strategy, leg)


def go(strategy: Strategy, leg: Leg) -> Notes:
    """Build from a seed, load, train, save, train on."""
    strategy.seed_everything(leg.seed)
    with strategy.module_init_context():
        model = models.make("gpt")
    optimizer = models.make_optimizer("adamw", model)
    if leg.load is not None:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE_BEFORE_LOADING
    model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, HALF_PERIOD, eta_min=0.001)
    loader = strategy.process_dataloader(numbered_texts(), split_batches=True)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "step": 0}
    if leg.load is not None:
        assert strategy.load_checkpoint(leg.load, state) == {}
    step = state["step"]
    drawn = draw(strategy)  # before anything else: some engines' generators move with whatever runs on the device
    loaded = bits(strategy, model, optimizer) if leg.load is not None else {}
    batches = endless(loader)

    def train(steps: int, drawn: dict[str, float]) -> Stretch:
        samples, losses = [], []
        for _ in range(steps):
            numbers, *batch = next(batches)
            loss = model(*batch)
            strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            scheduler.step()
            losses.append(float(strategy.all_reduce(loss.detach())))
            shares = strategy.collectives.gather_objects(numbers.tolist())
            samples.append(sorted({number for share in shares for number in share}))
        return Stretch(drawn=drawn, samples=samples, losses=losses)

    taken = train(leg.steps, drawn)
    left = bits(strategy, model, optimizer)
    if leg.save is not None:
        strategy.save_checkpoint(leg.save, {**state, "step": step + leg.steps}, state_dict_type=leg.form)
    further = train(leg.further, draw(strategy))
    data_ranks = strategy.collectives.gather_objects(strategy.distributed_sampler_kwargs["rank"])
    return Notes(step=step, loaded=loaded, taken=taken, left=left, further=further, data_ranks=data_ranks)


def numbered_texts() -> DataLoader[Any]:
    """Load the batches of an epoch, shuffled; each sample comes with its number."""
    inputs, targets = models.batches("gpt", 1, EPOCH_STEPS * BATCH)[0]
    return DataLoader(TensorDataset(torch.arange(len(inputs)), inputs, targets), batch_size=BATCH, shuffle=True)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of epoch after epoch."""
    while True:
        yield from loader


def draw(strategy: Strategy) -> dict[str, float]:
    """Draw from each random number generator of this rank."""
    return {
        "python": random.random(),
        "numpy": float(numpy.random.random()),
        "torch": torch.rand(()).item(),
        "device": torch.rand((), device=strategy.root_device).item(),
    }


def bits(strategy: Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copy every whole tensor of model and optimizer, by name."""
    found = {f"model.{name}": tensor.detach().cpu().clone() for name, tensor in strategy.full_parameters(model)}
    for name, slots in strategy.optimizer_state_dict(optimizer).get("state", {}).items():
        found |= {f"{name}.{slot}": torch.as_tensor(value).cpu().clone() for slot, value in slots.items()}
    return found
