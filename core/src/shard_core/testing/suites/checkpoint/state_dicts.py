"""State dicts and checkpoints hold what is now, for each parameter its own, every time."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from shard_core.errors import ShardError
from shard_core.testing import models, oracle
from shard_core.testing.bits import Bits, assert_same_bits, samples
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.training import set_up, step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from shard_core.strategy import Strategy
    from shard_core.testing.strategy_under_test import Ranks, Subject

#: Steps before the load; from the middle on, what was frozen is trained.
_STEPS = 4


class StateDicts(Suite):
    """State dicts and checkpoints hold what is now, for each parameter its own, every time."""

    @pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
    @promise(after=("state_dicts_are_whole", "round_trip_is_bitwise", "moments_come_back"), every_size=False)
    def test_every_state_dict_is_of_its_moment(self, ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
        """State dicts and checkpoints made one after the other, with steps in between, are each of their own moment.

        All weights, and all that the optimizer keeps of each, are those of plain PyTorch at that step; what was
        returned stays so while training goes on.

        Usual cause:
            What was gathered or copied for the first is kept and handed out again, if only for one tensor, or what is
            handed out is what trains.
        """
        run = ranks.run(train_and_look, tmp_path, ("uneven", optimizer), 2)[0]
        assert isinstance(run, _Run), f"it was refused: {run}"
        _assert_like_plain(run, _looks_plainly(("uneven", optimizer), 2))

    @pytest.mark.parametrize("how", ["left out", "unfrozen", "loaded"])
    @promise(
        after=(
            *("unused_parameters_keep_their_values", "every_state_dict_is_of_its_moment"),
            *("loads_at_another_world_size", "loads_what_other_strategies_saved", "unfrozen_parameters_train"),
        ),
        every_size=False,
    )
    def test_steps_are_counted_for_each_parameter(
        self, ranks: Ranks, ranks_of: Callable[..., Ranks], tmp_path: Path, how: str
    ) -> None:
        """Parameters that took part in fewer steps than others keep a count of their own, in checkpoints too.

        Losses left them out, they were unfrozen later, or they come from such a run's checkpoint. A strategy may
        refuse what it cannot hold, with a ``ShardError`` that says what to do.

        Usual cause:
            One count is kept for all parameters or for a group, or a missing gradient counts as zeros: adaptive
            optimizers then take later steps of another size, without a word.
        """
        made = _COUNTED["unfrozen" if how == "loaded" else how]
        if how == "loaded":
            ranks_of(1, "single").run(train_and_look, tmp_path, made, _STEPS)
        answers = ranks.run(train_and_look, tmp_path, made, 0 if how == "loaded" else _STEPS)
        if all(isinstance(answer, str) for answer in answers):
            assert how != "loaded" or "step" in answers[0], f"the refusal does not say that steps differ: {answers[0]}"
            return
        assert not any(isinstance(answer, str) for answer in answers), f"only some ranks refused: {answers}"
        _assert_like_plain(answers[0], _looks_plainly(made, _STEPS))


class _InTurns(nn.Module):
    """A layer that the first step uses and every second one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.make("plain")
        self.rare = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss: torch.Tensor = self.inner(self.rare(inputs) if self.calls % 2 else inputs, targets)
        return loss


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


_Made = tuple[str | type[nn.Module], "str | Callable[[nn.Module], torch.optim.Optimizer]"]
"""A model and an optimizer: their names in the zoo, or what builds them."""

_COUNTED: dict[str, _Made] = {"left out": (_InTurns, _adamw), "unfrozen": ("frozen", _adamw)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """What a rank saw; what state dicts hold is on rank 0.

    Attributes:
        looks: What they held after each step.
        loaded: What they held after a fresh run had loaded what was saved last.
        after: What they held one step later.
    """

    looks: list[Bits]
    loaded: Bits
    after: Bits


def _assert_like_plain(run: _Run, truths: list[Bits]) -> None:
    for number, look in enumerate(run.looks):
        _assert_same(f"after step {number + 1}", look, truths[number])
    if run.looks:
        assert_same_bits("after a load of what was saved last", run.loaded, run.looks[-1])
    _assert_same("after a load of what was saved last", run.loaded, truths[-2])
    _assert_same("one step after a load", run.after, truths[-1])


def _assert_same(when: str, look: Bits, truth: Bits) -> None:
    try:
        # Second moments are squares: where gradients differ by 1e-5, as other devices' do, they differ by twice that.
        oracle.assert_same_weights(look, truth, 2e-5, elementwise=True)
    except AssertionError as error:
        raise AssertionError(f"{when}, state dicts are not of that moment: {error}") from error


def train_and_look(subject: Subject, path: Path, made: _Made, steps: int) -> _Run | str:
    """Step, look and save, again and again; load what was saved last into a fresh run, look, step and look.

    Args:
        subject: The strategy.
        path: Where checkpoints are.
        made: A model and an optimizer.
        steps: How many steps; none where a checkpoint is there already.

    Returns:
        What was seen, or the strategy's error.
    """
    try:
        with subject.strategy() as strategy:
            looks = _looks(strategy, path, made, samples(steps)) if steps else []
        with subject.strategy() as strategy:
            saved = sorted(path.iterdir())[-1]
            batch = samples(int(saved.name) + 1)[-1]
            model, optimizer = set_up(strategy, lambda: _built(made).requires_grad_(True), made[1], seed=1)
            strategy.load_checkpoint(saved, {"model": model, "optimizer": optimizer})
            loaded = _look(strategy, model, optimizer)
            step(strategy, model, optimizer, batch)
            return _Run(looks=looks, loaded=loaded, after=_look(strategy, model, optimizer))
    except ShardError as refusal:
        return str(refusal)


def _looks(strategy: Strategy, path: Path, made: _Made, batches: list[tuple[Any, ...]]) -> list[Bits]:
    returned = []
    model, optimizer = set_up(strategy, *made)
    for number, batch in enumerate(batches):
        _unfreeze(number, strategy.unwrap(model))
        step(strategy, model, optimizer, batch)
        returned.append(_state_dicts(strategy, model, optimizer))
        strategy.save_checkpoint(path / str(number + 1), {"model": model, "optimizer": optimizer})
    return [_flat(*each) for each in returned]  # now that all has been trained


@functools.cache
def _looks_plainly(made: _Made, steps: int) -> list[Bits]:
    torch.manual_seed(0)
    model = _built(made)
    optimizer = made[1](model) if callable(made[1]) else models.make_optimizer(made[1], model)
    looks = []
    for number, batch in enumerate(samples(steps + 1)):
        _unfreeze(number, model)
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
        looks.append(_flat(model.state_dict(), state))
    return looks


def _built(made: _Made) -> nn.Module:
    return models.make(made[0]) if isinstance(made[0], str) else made[0]()


def _unfreeze(number: int, model: nn.Module) -> None:
    """Train everything from the middle on."""
    if number == _STEPS // 2:
        model.requires_grad_(True)


def _look(strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> Bits:
    return _flat(*_state_dicts(strategy, model, optimizer))


def _state_dicts(
    strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Mapping[str, Any]]]:
    return strategy.module_state_dict(model), strategy.optimizer_state_dict(optimizer).get("state", {})


def _flat(weights: Mapping[str, torch.Tensor], state: Mapping[str, Mapping[str, Any]]) -> Bits:
    found = {f"model.{name}": tensor.detach().cpu().clone() for name, tensor in weights.items()}
    for name, slots in state.items():
        for slot, value in slots.items():
            found[f"optim.{name}.{slot}"] = torch.as_tensor(value, dtype=torch.float32).detach().cpu().clone()
    return found
