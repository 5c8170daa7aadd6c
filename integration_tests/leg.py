"""One leg of a journey: load a checkpoint under some strategy, note every bit of it, train on, save.

As a script it goes one leg with whatever is installed beside its interpreter, and leaves its notes in a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from shard_core import Strategy, get_strategy
from shard_core.testing import models
from shard_core.testing.training import step

STEPS, BATCH = 4, 12
LEARNING_RATE_BEFORE_LOADING = 123.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leg:
    """Where a leg begins and ends.

    Attributes:
        seed: What the weights are drawn from, in vain where a checkpoint is loaded.
        load: The checkpoint it begins with.
        save: Where it leaves one.
        first: How many steps were taken before it.
        steps: How many it takes.
        form: In which form it saves.
    """

    seed: int = 0
    load: Path | None = None
    save: Path | None = None
    first: int = 0
    steps: int = STEPS
    form: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notes:
    """What was seen on a leg.

    Attributes:
        losses: The loss of each step over all ranks.
        step: The step that stood in the checkpoint.
        loaded: Every tensor right after loading; empty where nothing was loaded.
        left: Every tensor at the end.
    """

    losses: list[float]
    step: int
    loaded: dict[str, torch.Tensor]
    left: dict[str, torch.Tensor]


def go(strategy: Strategy, leg: Leg) -> Notes:
    """Build from a seed, load, train on the batches from the leg's first, save."""
    strategy.seed_everything(leg.seed)
    with strategy.module_init_context():
        model = models.make("gpt")
    optimizer = models.make_optimizer("adamw", model)
    if leg.load is not None:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE_BEFORE_LOADING
    model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if leg.load is not None:
        assert strategy.load_checkpoint(leg.load, state) == {}
    loaded = bits(strategy, model, optimizer) if leg.load is not None else {}
    losses = []
    for batch in models.batches("gpt", leg.first + leg.steps, BATCH)[leg.first :]:
        losses.append(step(strategy, model, optimizer, batch))
        scheduler.step()
    if leg.save is not None:
        strategy.save_checkpoint(leg.save, {**state, "step": leg.first + leg.steps}, state_dict_type=leg.form)
    return Notes(losses=losses, step=state["step"], loaded=loaded, left=bits(strategy, model, optimizer))


def bits(strategy: Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copy every whole tensor of model and optimizer, by name."""
    found = {f"model.{name}": tensor.detach().cpu().clone() for name, tensor in strategy.full_parameters(model)}
    for name, slots in strategy.optimizer_state_dict(optimizer).get("state", {}).items():
        found |= {f"{name}.{slot}": torch.as_tensor(value).cpu().clone() for slot, value in slots.items()}
    return found


def assert_nothing_changed(loaded: dict[str, torch.Tensor], saved: dict[str, torch.Tensor], where: str) -> None:
    """Compare what a leg has loaded with what the leg before left, bit for bit."""
    assert loaded.keys() == saved.keys(), f"{where} has other tensors: {loaded.keys() ^ saved.keys()}"
    for key, tensor in saved.items():
        assert loaded[key].dtype == tensor.dtype, f"{key} has another dtype {where}"
        assert torch.equal(loaded[key], tensor), f"{key} changed on its way to {where}"


def main() -> None:
    """Go one leg."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategy")
    parser.add_argument("--options", type=json.loads, default={}, help="for get_strategy, as JSON")
    parser.add_argument("--notes", type=Path, required=True, help="where the notes go")
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--first", type=int, default=0)
    told = parser.parse_args()
    leg = Leg(seed=told.first, load=told.load, save=told.save, first=told.first)
    notes: Any = get_strategy(told.strategy, **told.options).launch(go, leg)
    torch.save(dataclasses.asdict(notes), told.notes)


if __name__ == "__main__":
    main()
