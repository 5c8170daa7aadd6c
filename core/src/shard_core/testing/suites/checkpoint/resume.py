"""A resumed run goes on as if it had never stopped."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from shard_core.testing import models, oracle
from shard_core.testing.bits import Assorted, Bits, assert_same_bits, bits_of, samples, trained
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.training import set_up, step, whole_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shard_core.testing.strategy_under_test import Ranks, Subject

_STEPS = 6


class Resume(Suite):
    """A resumed run goes on as if it had never stopped."""

    @promise(after=("optimizer_made_before_or_after_setup",))
    def test_moments_come_back(self, ranks: Ranks, tmp_path: Path) -> None:
        """Optimizer state comes back bit for bit, into a fresh optimizer and into one with state of its own.

        Usual cause:
            Optimizers make their state at the first step, so that a load into a fresh one finds nothing to fill.
        """
        for kind, (saved, loaded) in ranks.run(saves_moments, tmp_path)[0].items():
            assert saved, f"the state dict of an optimizer is empty after two steps ({kind})"
            assert_same_bits(f"after a load into {kind}", loaded, saved)

    @promise(after=("optimizer_made_before_or_after_setup",))
    def test_groups_come_back_by_name(self, ranks: Ranks, tmp_path: Path) -> None:
        """Hyper-parameters come back to the groups that hold the same parameters, wherever those stand.

        Usual cause:
            Groups are restored by their position, or ``param_groups`` not at all.
        """
        for rank, (saved, loaded) in enumerate(ranks.run(saves_groups, tmp_path)):
            assert loaded == saved, f"the groups of matrices and of the rest have on rank {rank} {loaded}, not {saved}"

    @promise(after=("groups_come_back_by_name",), every_size=False)
    def test_empty_groups_come_back(self, ranks: Ranks, tmp_path: Path) -> None:
        """A group without parameters comes back with its hyper-parameters, too: later ones may be added to it.

        Usual cause:
            Groups are kept by the names of their parameters, and a group that has none by no name.
        """
        for rank, (saved, loaded) in enumerate(ranks.run(saves_an_empty_group, tmp_path)):
            assert loaded == saved, f"of an empty group and of one that is not, rank {rank} has {loaded}, not {saved}"

    @promise(
        after=(
            "same_seed_same_weights",
            "round_trip_is_bitwise",
            "ties_come_back_tied",
            "plain_values_come_back",
            "moments_come_back",
            "groups_come_back_by_name",
        )
    )
    def test_resume_equals_uninterrupted(self, ranks: Ranks, tmp_path: Path) -> None:
        """A run that is saved, ended and resumed has the losses and the weights of one that never stopped.

        They are the same within the bounds of training itself: engines may add gradients up in another order once
        they have warmed up. That the state at the resumption has the same bits is promised apart.

        Usual cause:
            Something is not in the checkpoint: a counter, a master copy of the weights, the scheduler's place.
        """
        half = _STEPS // 2
        whole = ranks.run(go_on, _Leg(first=0, last=_STEPS))[0]
        ranks.run(go_on, _Leg(first=0, last=half, save=tmp_path))
        losses, rates, weights = ranks.run(go_on, _Leg(first=half, last=_STEPS, load=tmp_path))[0]
        assert rates == whole[1][half:], f"the learning rates after the resumption are {rates}, not {whole[1][half:]}"
        oracle.assert_same_numbers("loss after the resumption", losses, whole[0][half:], 2e-6)
        oracle.assert_same_weights(weights, whole[2], 1e-5)

    @promise(after=("same_seed_same_run", "resume_equals_uninterrupted"))
    def test_random_numbers_go_on(self, ranks: Ranks, tmp_path: Path) -> None:
        """A run that was saved, and one that resumes there, draw what the uninterrupted run draws on each rank.

        Usual cause:
            The states of the generators are not in the checkpoint, only rank 0's are, or something draws during the
            save, or between the load and the first step.
        """
        half = _STEPS // 2
        whole = ranks.run(draws, _Leg(first=0, last=_STEPS))
        saved = ranks.run(draws, _Leg(first=0, last=_STEPS, save=tmp_path))
        resumed = ranks.run(draws, _Leg(first=half, last=_STEPS, load=tmp_path))
        for when, runs in (("the save", [masks[half:] for masks in saved]), ("the resumption", resumed)):
            for rank, masks in enumerate(runs):
                for step_number, (mask, expected) in enumerate(zip(masks, whole[rank][half:], strict=True)):
                    assert torch.equal(mask, expected), (
                        f"rank {rank}: dropout of step {step_number} after {when} is not the uninterrupted run's"
                    )


class _Dropping(torch.nn.Module):
    """Drops elements of what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(64))
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = self.dropout(inputs * self.scale)
        return dropped


def draws(subject: Subject, leg: _Leg) -> list[torch.Tensor]:
    """Train with dropout, and save half-way; return what each step dropped on this rank."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(
            strategy, _Dropping, lambda module: torch.optim.SGD(module.parameters(), lr=0.1), seed=1 if leg.load else 0
        )
        state = {"model": model, "optimizer": optimizer}
        if leg.load:
            strategy.load_checkpoint(leg.load, state)
        masks = []
        for number in range(leg.first, leg.last):
            if leg.save and number == _STEPS // 2:
                strategy.save_checkpoint(leg.save, state)
            output = model(strategy.batch_to_device(torch.ones(8, 64)))
            strategy.backward(output.mean(), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            masks.append(output.detach().cpu() != 0)
        return masks


def saves_moments(subject: Subject, folder: Path) -> dict[str, tuple[Bits, Bits]]:
    """Save optimizer state and load it into others; give it before and after."""
    found = {}
    for name, places in {"adamw": {"fresh": 0, "used": 3}, "sgd": {"fresh": 0}}.items():
        with subject.strategy() as strategy:
            model, optimizer = trained(strategy, optimizer=name, steps=2)
            strategy.save_checkpoint(folder / name, {"model": model, "optimizer": optimizer})
            saved = _moments(bits_of(strategy, model, optimizer))
        for kind, steps in places.items():
            with subject.strategy() as strategy:
                model, optimizer = trained(strategy, optimizer=name, seed=1, steps=steps)
                strategy.load_checkpoint(folder / name, {"model": model, "optimizer": optimizer})
                found[f"a {kind} {name}"] = saved, _moments(bits_of(strategy, model, optimizer))
    return found


def _moments(bits: Bits) -> Bits:
    return {key: tensor for key, tensor in bits.items() if key.startswith("optim.")}


def saves_groups(subject: Subject, path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Save an optimizer and load it into one with its groups in another order; give both, matrices first."""
    with subject.strategy() as strategy:
        model, optimizer = trained(strategy, "plain", _adamw(lambda groups: groups))
        for factor, group in enumerate(optimizer.param_groups, start=2):
            group["lr"] /= factor
        strategy.save_checkpoint(path, {"model": model, "optimizer": optimizer})
        saved = [_hyper_parameters(group) for group in optimizer.param_groups]
    with subject.strategy() as strategy:
        others = _adamw(lambda groups: [{**group, "lr": 9.0, "weight_decay": 9.0} for group in reversed(groups)])
        model, optimizer = set_up(strategy, "plain", others, seed=1)
        for group in optimizer.param_groups:
            group["betas"] = (0.1, 0.1)
        strategy.load_checkpoint(path, {"model": model, "optimizer": optimizer})
        return saved, [_hyper_parameters(group) for group in reversed(optimizer.param_groups)]


def saves_an_empty_group(subject: Subject, path: Path) -> tuple[list[float], list[float]]:
    """Save an optimizer one of whose groups is empty and load it into one with other rates; give the rates."""

    def optimizer_at(rate: float) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
        return lambda module: torch.optim.SGD(
            [{"params": [], "lr": rate}, {"params": list(module.parameters()), "lr": 2 * rate}]
        )

    rates: list[list[float]] = []
    for rate in (0.25, 1.0):
        with subject.strategy() as strategy:
            model, optimizer = set_up(strategy, "plain", optimizer_at(rate))
            state = {"model": model, "optimizer": optimizer}
            if rates:
                strategy.load_checkpoint(path, state)
            else:
                strategy.save_checkpoint(path, state)
            rates.append([group["lr"] for group in optimizer.param_groups])
    saved, loaded = rates
    return saved, loaded


def _adamw(
    arrange: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    return lambda module: torch.optim.AdamW(arrange(models.param_groups(module)), lr=0.01)


def _hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in ("lr", "weight_decay", "betas", "eps")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Leg:
    """A part of a run: which steps, and where it comes from and goes to."""

    first: int
    last: int
    load: Path | None = None
    save: Path | None = None


def go_on(subject: Subject, leg: _Leg) -> tuple[list[float], list[list[float]], Bits]:
    """Train one leg; give the losses, the learning rates of each step, and the weights at the end."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, Assorted, "adamw", seed=1 if leg.load else 0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        if leg.load:
            strategy.load_checkpoint(leg.load, state)
        losses, rates = [], []
        for batch in samples(_STEPS)[leg.first : leg.last]:
            rates.append([group["lr"] for group in optimizer.param_groups])
            losses.append(step(strategy, model, optimizer, batch))
            scheduler.step()
        if leg.save:
            strategy.save_checkpoint(leg.save, state)
        return losses, rates, whole_weights(strategy, model)
