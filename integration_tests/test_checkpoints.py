"""A checkpoint of one strategy and world size goes on under any other, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shard_core import get_strategy
from shard_core.testing import models
from shard_core.testing.oracle import assert_same_numbers

STEPS, BATCH = 4, 12


def bits(strategy: Any, model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Every whole tensor of model and optimizer, by name."""
    found = {f"model.{name}": tensor.clone() for name, tensor in strategy.full_parameters(model)}
    for name, slots in strategy.optimizer_state_dict(optimizer).get("state", {}).items():
        found |= {f"{name}.{slot}": torch.as_tensor(value).clone() for slot, value in slots.items()}
    return found


def go_on(
    strategy_name: str, seed: int, load: Path | None, save: Path | None, first: int, steps: int, form: str | None = None
) -> Any:
    """Build from a seed, load, note the bits, train on the batches from ``first``, save."""
    with get_strategy(strategy_name) as strategy:
        strategy.seed_everything(seed)
        with strategy.module_init_context():
            model = models.make("gpt")
        optimizer = models.make_optimizer("adamw", model)
        if load is not None:
            for group in optimizer.param_groups:
                group["lr"] = 123.0
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
        loaded = None
        if load is not None:
            assert strategy.load_checkpoint(load, state) == {}
            loaded = state["step"], bits(strategy, model, optimizer)
        losses = []
        for batch in models.batches("gpt", first + steps, BATCH)[first:]:
            loss = model(*models.share(batch, strategy.global_rank, strategy.world_size))
            strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            scheduler.step()
            losses.append(strategy.all_reduce(loss).item())
        if save is not None:
            strategy.save_checkpoint(save, {**state, "step": first + steps}, state_dict_type=form)
        return losses, loaded, bits(strategy, model, optimizer)


LEGS = [("fsdp", 2), ("ddp", 3), ("single", 1), ("fsdp", 3), ("ddp", 2), ("fsdp", 1), ("fsdp", 2)]


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_ring_through_all_strategies(worlds: Any, tmp_path: Path, form: str) -> None:
    """Each leg loads what the leg before saved, has its very bits, and goes on as if never interrupted."""
    uninterrupted = worlds(1).run(go_on, "single", 0, None, None, 0, STEPS * len(LEGS))[0][0]
    losses: list[float] = []
    saved: dict[str, torch.Tensor] = {}
    for leg, (strategy, size) in enumerate(LEGS):
        load = tmp_path / f"leg-{leg - 1}" if leg else None
        arguments = (strategy, leg, load, tmp_path / f"leg-{leg}", leg * STEPS, STEPS, form)
        mine, loaded, now = worlds(size).run(go_on, *arguments)[0]
        if loaded is not None:
            step, found = loaded
            assert step == leg * STEPS
            assert found.keys() == saved.keys()
            for key, tensor in saved.items():
                assert found[key].dtype == tensor.dtype
                assert torch.equal(found[key], tensor), f"{key} changed on its way to {strategy} at {size}"
        saved = now
        losses += mine
    assert_same_numbers("loss", losses, uninterrupted, 2e-6)
