"""What does not fit is named, all at once, and nothing is changed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shard_core.errors import CheckpointMismatch
from shard_core.testing.bits import Bits, assert_same_bits, bits_of, trained
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite

if TYPE_CHECKING:
    from pathlib import Path

    from shard_core.testing.strategy_under_test import Ranks, Subject

_DIFFERING = (
    "reshaped.weight",
    "reshaped.bias",
    "added.weight",
    "added.bias",
    "gone.weight",
    "gone.bias",
    "count",
    "epoch",
)


class Saved(nn.Module):
    """What is in the checkpoint."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(6, 5)
        self.reshaped = nn.Linear(5, 3)
        self.gone = nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int32))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the mean squared error."""
        return functional.mse_loss(self.reshaped(torch.tanh(self.same(inputs))) + self.gone(inputs), targets)


class Here(nn.Module):
    """What it is loaded into: one layer is the same."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(6, 5)
        self.reshaped = nn.Linear(5, 4)
        self.added = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the mean squared error."""
        return functional.mse_loss(self.added(self.reshaped(torch.tanh(self.same(inputs)))), targets)


class Larger(Saved):
    """The same model with one parameter more, which is the last to be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the mean squared error."""
        loss: torch.Tensor = super().forward(inputs, targets) + self.zero(inputs).square().mean()
        return loss


class Mismatch(Suite):
    """What does not fit is named, all at once, and nothing is changed."""

    @promise(after=("optimizer_made_before_or_after_setup",))
    def test_strict_names_every_difference(self, ranks: Ranks, tmp_path: Path) -> None:
        """A strict load names all that differs or lacks in one error, alike on every rank.

        Usual cause:
            The load stops at the first difference, or leaves out what it cannot place.
        """
        ranks.run(saves, tmp_path)
        messages = ranks.run(loads_strictly, tmp_path)
        assert messages[0], "a model that differs from the checkpoint was loaded strictly, without an error"
        unnamed = [name for name in _DIFFERING if not _names(messages[0], name)]
        assert not unnamed, f"the refusal does not name {unnamed}:\n{messages[0]}"
        assert len(set(messages)) == 1, f"the ranks raised unlike errors: {messages}"

    @promise(after=("round_trip_is_bitwise", "moments_come_back"), every_size=False)
    def test_not_strict_takes_what_fits(self, ranks: Ranks, tmp_path: Path) -> None:
        """With ``strict=False`` a load takes what fits, leaves the rest as it was and names it in a warning.

        Usual cause:
            ``strict`` is not passed on, or what does not fit is truncated, padded or zeroed.
        """
        saved = ranks.run(saves, tmp_path)[0]
        refusal, warned, before, after = ranks.run(loads_what_fits, tmp_path)[0]
        assert not refusal, f"the load was refused in spite of strict=False: {refusal}"
        taken = {name for name in before if any(name.startswith(f"{kind}.same.") for kind in ("model", "optim"))}
        expected = {name: saved[name] if name in taken else tensor for name, tensor in before.items()}
        assert_same_bits("after a load with strict=False", after, expected)
        unnamed = [name for name in _DIFFERING if not _names(warned, name)]
        assert not unnamed, f"nothing warns that {unnamed} were left as they were; the warnings are: {warned!r}"

    @promise(after=("strict_names_every_difference",), every_size=False)
    @pytest.mark.parametrize("difference", ["tensor", "optimizer", "value"])
    def test_mismatch_changes_nothing(self, ranks: Ranks, tmp_path: Path, difference: str) -> None:
        """A refused load leaves weights, optimizer, schedulers and the user's dict as they were.

        Usual cause:
            Differences are looked for while tensors are being filled, or values after it.
        """
        ranks.run(saves, tmp_path)
        for rank, (refusal, before, after) in enumerate(ranks.run(is_refused, tmp_path, difference)):
            assert refusal, f"rank {rank} loaded strictly what differs in one {difference}"
            where = f"after a refused load on rank {rank}"
            assert_same_bits(where, after.pop("bits"), before.pop("bits"))
            assert after == before, f"{where} the rest is {after}, before it was {before}"


def _names(message: str, name: str) -> bool:
    """Return whether a message names something, as a word of its own or at the end of a key."""
    return re.search(rf"(?<![\w]){re.escape(name)}(?![\w.])", message) is not None


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def _adagrad(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(module.parameters(), lr=0.1)


def saves(subject: Subject, path: Path) -> Bits:
    """Save a trained model, its optimizer, a scheduler and a value; give all bits."""
    with subject.strategy() as strategy:
        model, optimizer = trained(strategy, Saved, _sgd)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 1}
        strategy.save_checkpoint(path, state)
        return bits_of(strategy, model, optimizer)


def loads_strictly(subject: Subject, path: Path) -> str:
    """Load into what differs in every way; give the error's message."""
    with subject.strategy() as strategy:
        model, optimizer = trained(strategy, Here, _sgd, seed=1)
        try:
            strategy.load_checkpoint(path, {"model": model, "optimizer": optimizer, "epoch": 3})
        except CheckpointMismatch as error:
            return str(error)
        return ""


def loads_what_fits(subject: Subject, path: Path) -> tuple[str, str, Bits, Bits]:
    """Load into what differs in every way with ``strict=False``; return the warnings, and all bits around it."""
    with subject.strategy() as strategy:
        model, optimizer = trained(strategy, Here, _sgd, seed=1)
        state = {"model": model, "optimizer": optimizer, "epoch": 3}
        before = bits_of(strategy, model, optimizer)
        refusal = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                strategy.load_checkpoint(path, state, strict=False)
            except CheckpointMismatch as error:
                refusal = str(error)
        assert state["epoch"] == 3, f"a value the checkpoint lacks became {state['epoch']!r}; it was 3"
        warned = "\n".join(str(warning.message) for warning in caught)
        return refusal, warned, before, bits_of(strategy, model, optimizer)


def is_refused(subject: Subject, path: Path, difference: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Load into what differs in one way; give the error's message, and the whole state before and after."""
    make_model: Callable[[], nn.Module] = Larger if difference == "tensor" else Saved
    make_optimizer = _adagrad if difference == "optimizer" else _sgd
    with subject.strategy() as strategy:
        model, optimizer = trained(strategy, make_model, make_optimizer, seed=1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 9}
        if difference == "value":
            state["epoch"] = 3

        def everything() -> dict[str, Any]:
            groups = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
            values = {name: state[name] for name in ("step", "epoch") if name in state}
            return {
                "bits": bits_of(strategy, model, optimizer),
                "groups": groups,
                "scheduler": scheduler.step_size,
                "values": values,
            }

        before = everything()
        refusal = ""
        try:
            strategy.load_checkpoint(path, state)
        except CheckpointMismatch as error:
            refusal = str(error)
        return refusal, before, everything()
