"""What is saved comes back bit for bit into the same place."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shard_core.errors import CheckpointMismatch
from shard_core.testing import models, oracle
from shard_core.testing.bits import BATCH, Assorted, Bits, assert_same_bits, samples, trained
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.training import set_up, step, whole_weights

if TYPE_CHECKING:
    from pathlib import Path

    from shard_core.testing.strategy_under_test import Ranks, Subject


class RoundTrip(Suite):
    """What is saved comes back bit for bit into the same place."""

    @promise(after=("averages_gradients", "optimizer_made_before_or_after_setup"))
    @pytest.mark.parametrize("form", ["sharded", "full"])
    def test_round_trip_is_bitwise(self, ranks: Ranks, tmp_path: Path, form: str) -> None:
        """Parameters and buffers come back bit for bit, on every rank, from either form of a checkpoint.

        Usual cause:
            A tensor is cast, averaged or taken from the wrong rank on its way, or only rank 0 fills its replica.
        """
        for rank, trip in enumerate(ranks.run(goes_and_comes_back, tmp_path, form)):
            (before, loss_before), (after, loss_after) = trip
            assert_same_bits(f"after a load on rank {rank}", after, before)
            assert abs(loss_before - loss_after) <= 1e-6 * abs(loss_before), (
                f"after a load the loss of rank {rank} is {loss_after!r}, at the save it was {loss_before!r}: what "
                "this rank computes with is not what was loaded"
            )

    @promise(after=("averages_gradients",))
    def test_state_dicts_are_whole(self, ranks: Ranks) -> None:
        """State dicts hold whole tensors on rank 0, under the user's own names, and nothing elsewhere.

        Usual cause:
            A shard is handed out for the whole, a wrapper's prefix is left in the names, or every rank holds a copy.
        """
        truth = _one_step_of_sgd()
        (weights, moments, groups), *others = ranks.run(hands_out_state_dicts)
        oracle.assert_same_weights(weights, truth.weights, 1e-6, elementwise=True)
        expected = {name: slots["momentum_buffer"] for name, slots in truth.optimizer_state.items()}
        oracle.assert_same_weights(moments, expected, 1e-5, elementwise=True)
        assert groups == [
            [name for name in expected if expected[name].ndim >= 2],
            [name for name in expected if expected[name].ndim < 2],
        ], f"the groups of the optimizer's state dict hold the parameters {groups}"
        for rank, answer in enumerate(others, start=1):
            assert answer == ({}, {}, []), f"rank {rank} holds {answer}, and only rank 0 should hold anything"

    @promise(after=("round_trip_is_bitwise",))
    def test_filter_keeps_what_it_names(self, ranks: Ranks, tmp_path: Path) -> None:
        """A filter leaves out of a checkpoint every tensor whose key it refuses, and keeps the others.

        Usual cause:
            ``filter`` is not passed on to what writes the files.
        """
        for refusal, loaded, saved in ranks.run(keeps_one_layer, tmp_path):
            assert not refusal, f"a model of what the filter kept, and no more, was refused: {refusal}"
            assert_same_bits("after a load of what a filter kept", loaded, saved)

    @promise(after=("round_trip_is_bitwise", "ties_stay_tied", "filter_keeps_what_it_names"))
    def test_ties_come_back_tied(self, ranks: Ranks, tmp_path: Path) -> None:
        """A tied weight is saved once, and a load leaves it tied.

        Usual cause:
            A load puts a new tensor in the place of each name instead of filling the one that is there.
        """
        for stored, weights in ranks.run(steps_after_a_load, tmp_path):
            assert len(stored) == 1, f"the tied weight is stored as {stored}, so it takes more room than one"
            pair = [weights["middle.weight"], weights["again.weight"]]
            assert torch.equal(*pair), "a step after a load moved 'middle.weight' and 'again.weight' apart"

    @promise(after=("optimizer_made_before_or_after_setup",))
    def test_plain_values_come_back(self, ranks: Ranks, tmp_path: Path) -> None:
        """Values and the state of stateful objects come back as they were; what nobody asked for is returned.

        Usual cause:
            Values go through a format that turns tuples into lists or loses infinities, or the user's dict is not
            updated.
        """
        expected = _described({**_values(), "rank": 0, "scheduler": 3, "own": {"seen": 5}})
        for rank, (asked, all_names) in enumerate(ranks.run(saves_values, tmp_path)):
            differing = {name: (asked.get(name), value) for name, value in expected.items() if asked.get(name) != value}
            assert not differing, f"on rank {rank} came back, and was saved: {differing}"
            assert all_names == sorted([*expected, "model", "optimizer"]), (
                f"a load into nothing returned {all_names} on rank {rank}; it returns all there is"
            )


def goes_and_comes_back(subject: Subject, path: Path, form: str) -> list[tuple[Bits, float]]:
    """Save a model and load it into one from another seed; give its weights and its loss before and after."""
    found = []
    for seed in (0, 1):
        with subject.strategy() as strategy:
            model, optimizer = trained(strategy, seed=seed)
            state = {"model": model, "optimizer": optimizer}
            if seed == 0:
                strategy.save_checkpoint(path, state, state_dict_type=form)
            else:
                strategy.load_checkpoint(path, state)
            weights = whole_weights(strategy, model)
            # Every rank on the same samples: what is computed with must be right on each.
            with torch.no_grad():
                loss = float(model(*strategy.batch_to_device(samples(1)[0])))
            found.append((weights, loss))
    return found


@functools.cache
def _one_step_of_sgd() -> oracle.Trajectory:
    return oracle.train(
        lambda: models.make("uneven"),
        lambda module: models.make_optimizer("sgd", module),
        models.batches("uneven", 1, BATCH),
    )


def hands_out_state_dicts(subject: Subject) -> tuple[Bits, Bits, list[list[str]]]:
    """Train a step and give the whole weights, the momentum, and the parameters' names by group."""
    with subject.strategy() as strategy:
        model, optimizer = trained(strategy, "uneven", "sgd")
        weights = strategy.module_state_dict(model)
        about = strategy.optimizer_state_dict(optimizer)
        moments = {name: slots["momentum_buffer"] for name, slots in about.get("state", {}).items()}
        return weights, moments, [group["params"] for group in about.get("param_groups", [])]


class Part(torch.nn.Module):
    """The first layer of the zoo's plain model and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        applied: torch.Tensor = self.first(inputs)
        return applied


def keeps_one_layer(subject: Subject, path: Path) -> tuple[str, Bits, Bits]:
    """Save one layer of a model and load it into a module that has only that layer."""
    with subject.strategy() as strategy:
        model, optimizer = trained(strategy, "plain")
        state = {"model": model, "optimizer": optimizer}
        strategy.save_checkpoint(path, state, filter=lambda key: key.startswith("model.first."))
        saved = {name: each for name, each in whole_weights(strategy, model).items() if name.startswith("first.")}
    with subject.strategy() as strategy:
        part, _ = set_up(strategy, Part, lambda module: torch.optim.SGD(module.parameters(), lr=0.1), seed=1)
        refusal = ""
        try:
            strategy.load_checkpoint(path, {"model": part})
        except CheckpointMismatch as error:
            refusal = str(error)
        return refusal, whole_weights(strategy, part), saved


def steps_after_a_load(subject: Subject, path: Path) -> tuple[list[str], Bits]:
    """Save and load a model with tied weights, train a step; give the tied tensor's keys and the weights."""
    keys: set[str] = set()

    def note(key: str) -> bool:
        keys.add(key)
        return True

    with subject.strategy() as strategy:
        model, optimizer = trained(strategy)
        strategy.save_checkpoint(path, {"model": model, "optimizer": optimizer}, filter=note)
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, Assorted, "adamw", seed=1)
        strategy.load_checkpoint(path, {"model": model, "optimizer": optimizer})
        step(strategy, model, optimizer, samples(1)[0])
        stored = sorted(keys & {"model.middle.weight", "model.again.weight"})
        return stored, whole_weights(strategy, model)


class Seen:
    """A user's own object with state."""

    def __init__(self, seen: int) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state."""
        self.seen = state["seen"]


def _values() -> dict[str, Any]:
    """Return one value of every kind that a checkpoint holds."""
    return {
        "step": 7,
        "large": 2**70,
        "best": float("inf"),
        "loss": float("nan"),
        "third": 1 / 3,
        "name": "run \u00e9 \U0001f642",
        "nothing": None,
        "nested": {"pair": (1, [2.5, True]), 3: {"deep": ({}, [])}, "$odd": False},
        "history": torch.arange(5, dtype=torch.float64) / 3,
        "mask": [torch.tensor([True, False]), torch.tensor(2, dtype=torch.int8), torch.empty(0, 2)],
    }


def _described(value: Any) -> Any:
    """Format a value as text that two values share only if they are alike, types included."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.tolist()}"
    if isinstance(value, dict):
        return {key: _described(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} {[_described(item) for item in value]}"
    return f"{type(value).__name__} {value!r}"


def saves_values(subject: Subject, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Save values and load some into place; describe all that came back, and name what a load into nothing gave."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, "plain", "adamw")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        mine = {"rank": strategy.global_rank, "scheduler": scheduler, "own": Seen(5)}
        strategy.save_checkpoint(path, {"model": model, "optimizer": optimizer, **_values(), **mine})
        other, own = torch.optim.lr_scheduler.StepLR(optimizer, 9), Seen(0)
        into: dict[str, Any] = {"step": 0, "nested": None, "scheduler": other, "own": own}
        left = strategy.load_checkpoint(path, into)
        came_back = {**left, **into, "scheduler": other.step_size, "own": own.state_dict()}
        return _described(came_back), sorted(strategy.load_checkpoint(path))
