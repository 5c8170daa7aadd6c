"""Checkpoints go from stage to stage, from size to size and to other strategies, bit for bit."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_core import get_strategy
from shard_core.testing import bits, models, oracle, set_up, step, whole_weights

_STEPS, _BATCH = 6, 12


def make_optimizer(module: Any) -> torch.optim.Optimizer:
    """Build two groups: matrices decay, the rest learns faster."""
    return torch.optim.AdamW(models.param_groups(module), lr=0.01, betas=(0.8, 0.9))


def leg(
    options: dict[str, Any], first: int, last: int, load: Path | None, save: Path
) -> tuple[bits.Bits, list[float], bits.Bits]:
    """Train some steps; give all bits as they were loaded, the losses, and all bits as they were saved."""
    with get_strategy(**options) as strategy:
        model, optimizer = set_up(strategy, "gpt", make_optimizer, seed=first)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        if load:
            strategy.load_checkpoint(load, state)
        loaded = bits.bits_of(strategy, model, optimizer)
        losses = []
        for batch in models.batches("gpt", _STEPS, _BATCH)[first:last]:
            losses.append(step(strategy, model, optimizer, batch))
            scheduler.step()
        strategy.save_checkpoint(save, state)
        return loaded, losses, bits.bits_of(strategy, model, optimizer)


@pytest.mark.slow
def test_a_run_moves_between_stages_sizes_and_strategies(worlds: Any, tmp_path: Path) -> None:
    route: list[tuple[int, dict[str, Any], int]] = [
        (2, {"name": "deepspeed_stage_3", "param_persistence_threshold": 0}, 2),
        (3, {"name": "deepspeed_stage_1"}, 3),
        (2, {"name": "ddp"}, 4),
        (3, {"name": "deepspeed_stage_2"}, 5),
        (1, {"name": "deepspeed_stage_3"}, 6),
    ]
    losses: list[float] = []
    saved: bits.Bits = {}
    path, first = None, 0
    for hop, (size, options, last) in enumerate(route):
        target = tmp_path / str(hop)
        loaded, seen, now = worlds(size).run(leg, options, first, last, path, target)[0]
        if path:
            bits.assert_same_bits(f"on hop {hop}, to {options} at {size} ranks", loaded, saved)
        losses += seen
        saved, path, first = now, target, last
    torch.manual_seed(0)
    model = models.make("gpt")
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    truth = []
    for batch in models.batches("gpt", _STEPS, _BATCH):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        truth.append(loss.item())
    oracle.assert_same_numbers("loss over all hops", losses, truth, 2e-6)
    weights = {name.removeprefix("model."): bits for name, bits in saved.items() if name.startswith("model.")}
    expected = {name: p.detach() for name, p in model.named_parameters()}
    oracle.assert_same_weights({name: weights[name] for name in expected}, expected, 1e-5)


def uneven_counts(path: Path, options: dict[str, Any], load: bool) -> list[float]:
    """Step one of two layers more often than the other; give the optimizer's counts of steps."""
    with get_strategy(**options) as strategy:
        model, optimizer = set_up(strategy, "unused", "adamw", seed=int(load))
        if load:
            strategy.load_checkpoint(path, {"model": model, "optimizer": optimizer})
        else:
            for number, batch in enumerate(models.batches("unused", 3, _BATCH)):
                strategy.backward(model(*models.share_of(strategy, batch)), model)
                if number == 0:
                    for group in optimizer.param_groups:
                        group["params"][0].grad = None
                strategy.optimizer_step(optimizer)
                optimizer.zero_grad()
            strategy.save_checkpoint(path, {"model": model, "optimizer": optimizer})
        state = strategy.optimizer_state_dict(optimizer).get("state", {})
        return [float(state[name]["step"]) for name in sorted(state)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_step_counts_may_differ_inside_a_group(worlds: Any, tmp_path: Path, stage: int) -> None:
    options = {"name": "deepspeed", "stage": stage, **({"param_persistence_threshold": 0} if stage == 3 else {})}
    saved = worlds(2).run(uneven_counts, tmp_path / "run", options, False)[0]
    assert sorted(set(saved)) == [2.0, 3.0]
    assert worlds(3).run(uneven_counts, tmp_path / "run", options, True)[0] == saved
    assert (
        worlds(2).run(uneven_counts, tmp_path / "run", {"name": "ddp", "find_unused_parameters": True}, True)[0]
        == saved
    )


def reloaded_computes(options: dict[str, Any], path: Path) -> tuple[float, float, float]:
    """Load into a trained module without an optimizer; give the loss before, after, and of the saved module."""
    with get_strategy(**options) as strategy:
        (batch,) = models.batches("plain", 1, _BATCH)
        model, _ = set_up(strategy, "plain", "adamw")
        strategy.save_checkpoint(path, {"model": model})
        with torch.no_grad():
            saved = model(*batch).item()
        strategy.seed_everything(1)
        other = strategy.setup_module(models.make("plain"))
        with torch.no_grad():
            before = other(*batch).item()
            strategy.load_checkpoint(path, {"model": other})
            after = other(*batch).item()
        assert whole_weights(strategy, other).keys() == whole_weights(strategy, model).keys()
        return before, after, saved


@pytest.mark.parametrize(("stage", "threshold"), [(1, None), (2, None), (3, 0), (3, 100_000)])
def test_weights_loaded_after_setup_are_computed_with(
    worlds: Any, tmp_path: Path, stage: int, threshold: int | None
) -> None:
    options = {"name": "deepspeed", "stage": stage}
    options |= {} if threshold is None else {"param_persistence_threshold": threshold}
    for before, after, saved in worlds(2).run(reloaded_computes, options, tmp_path / "run"):
        assert after == saved != before


def counted(shards: list[Any]) -> list[tuple[int, int]]:
    return [(shard.stepped._version, shard.view._version) for shard in shards]


def change_early(stage: int, by_hand: bool) -> tuple[bool, bool]:
    """Train, or change weights by hand; give whether what a save would copy changed, and whether that was counted."""
    import deepspeed

    with get_strategy("deepspeed", stage=stage) as strategy:
        model, _ = set_up(strategy, "gpt", make_optimizer)
        module = strategy.unwrap(model)
        shards = strategy.engine_state({"model": module}, {}).shards()
        shards = [shard for shard in shards if shard.stepped is not None]
        before, then = [shard.view.clone() for shard in shards], counted(shards)
        strategy.backward(model(*models.share_of(strategy, models.batches("gpt", 1, _BATCH)[0])), model)
        parameters = list(module.parameters()) if by_hand else []
        whole = deepspeed.zero.GatheredParameters(parameters, modifier_rank=0) if stage == 3 else nullcontext()
        with whole, torch.no_grad():
            for parameter in parameters:
                parameter.mul_(2)
        changed = not all(torch.equal(shard.view, values) for shard, values in zip(shards, before, strict=True))
        return changed, counted(shards) != then


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_async_save_can_tell_weights_changed_by_hand_from_training(worlds: Any, stage: int, by_hand: bool) -> None:
    assert worlds(2).run(change_early, stage, by_hand) == [(by_hand, by_hand)] * 2
