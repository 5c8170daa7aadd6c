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


def refuse(strategy_name: str, path: Path, what: str) -> str:
    """Load into something that does not fit and return the message; nothing may have changed."""
    with get_strategy(strategy_name) as strategy:
        model = torch.nn.Linear(3, 3) if what == "model" else models.make("gpt")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        before = bits(strategy, model, optimizer)
        with pytest.raises(Exception) as error:  # noqa: PT011 - the caller looks at it
            strategy.load_checkpoint(path, {"model": model, "optimizer": optimizer, "stepp": 0})
        after = bits(strategy, model, optimizer)
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
        return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_what_does_not_fit_is_refused_with_every_rank_alike(
    worlds: Any, tmp_path: Path, strategy: str, size: int
) -> None:
    worlds(2).run(go_on, "fsdp", 0, None, tmp_path / "run" / "step-2", 0, 2)
    messages = worlds(size).run(refuse, strategy, tmp_path / "run" / "step-2", "model")
    assert len(set(messages)) == 1
    assert "CheckpointMismatch" in messages[0]
    assert "model.blocks.0.attention.weight" in messages[0]
    missing = worlds(size).run(refuse, strategy, tmp_path / "run", "gpt")
    assert len(set(missing)) == 1
    assert "CheckpointNotFound" in missing[0]
    assert "step-2" in missing[0], "the checkpoint that is there is named"
