"""Ranks start alike, and what they show is of one of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shard_core.testing import models, oracle
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.suites.training.runs import BATCH, train_on, whole_buffers
from shard_core.testing.training import set_up, whole_weights

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shard_core.strategy import Strategy
    from shard_core.testing.strategy_under_test import Ranks, Subject

_STEPS = 2

Tensors = dict[str, torch.Tensor]


class Replicas(Suite):
    """Ranks start alike, and what they show is of one of them."""

    @promise(after=("averages_gradients", "buffers_are_right", "frozen_parameters_stay_frozen"))
    def test_starts_from_rank_zero(self, ranks: Ranks) -> None:
        """A module that each rank has built with values of its own has rank 0's everywhere, from setup on.

        Parameters, trained or frozen, and buffers, persistent or not: they are looked at and computed with after setup
        and after some steps.

        Usual cause:
            Nothing is sent at setup, or only what is trained or persistent. It shows where modules are built outside
            ``module_init_context`` or after a seed of the rank's own: every rank goes on with weights of its own.
        """
        answers = ranks.run(train_from_own_values)
        truth = _rank_zero_plainly()
        _assert_alike("after setup", [answer.start for answer in answers], truth.start)
        means = [sum(losses) / len(losses) for losses in zip(*(answer.losses for answer in answers), strict=True)]
        oracle.assert_same_numbers("the ranks' mean loss", means, truth.losses, 1e-6)
        _assert_alike(f"after {_STEPS} steps", [answer.end for answer in answers], truth.end)

    @promise(after=("buffers_are_right",))
    def test_changed_buffers_are_of_one_rank(self, ranks: Ranks, tmp_path: Path) -> None:
        """Of buffers that forwards change, such as statistics, data rank 0's are shown and saved, every one of them.

        Usual cause:
            Ranks hold a copy each and take turns in writing copies, so that what is saved is of no rank, or each rank
            shows its own.
        """
        for rank, (replicas, kinds) in enumerate(ranks.run(gathers_statistics, tmp_path)):
            truth = _statistics_of_rank_zero(replicas)
            for kind, buffers in kinds.items():
                try:
                    oracle.assert_same_weights(buffers, truth, 1e-6, elementwise=True)
                except AssertionError as error:
                    raise AssertionError(f"{kind} on rank {rank} is not of data rank 0: {error}") from error


class _Assembled(nn.Module):
    """Something of each kind that a rank may have values of its own for."""

    factor: torch.Tensor
    shift: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.make("plain")
        self.fixed = nn.Linear(6, 6).requires_grad_(False)
        self.gain = nn.Parameter(torch.rand(()) + 0.5)
        self.register_buffer("factor", torch.rand(6) + 0.5)
        self.register_buffer("shift", torch.rand(6), persistent=False)
        self.register_buffer("calls", torch.randint(100, ()))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        loss: torch.Tensor = self.inner(self.fixed(inputs * self.factor + self.shift), targets)
        return loss * self.gain


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Look:
    """What a rank has at one moment.

    Attributes:
        weights: Whole parameters and persistent buffers.
        buffers: All that this rank has.
        loss: That of an evaluation on the same samples everywhere.
    """

    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    loss: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Story:
    start: _Look
    losses: list[float]
    end: _Look


def _assert_alike(when: str, looks: Sequence[_Look], truth: _Look) -> None:
    for rank, look in enumerate(looks):
        try:
            oracle.assert_same_weights(look.weights, truth.weights, 1e-6, elementwise=True)
            oracle.assert_same_weights(look.buffers, truth.buffers, 0)
        except AssertionError as error:
            raise AssertionError(f"{when} rank {rank} has not what rank 0 began with: {error}") from error
        assert abs(look.loss - truth.loss) <= 1e-6 * truth.loss, (
            f"{when} rank {rank} evaluates with other values than it shows: its loss is {look.loss!r}, with what "
            f"rank 0 began with it is {truth.loss!r}"
        )


def _samples() -> list[tuple[torch.Tensor, ...]]:
    return list(models.batches("plain", _STEPS, BATCH))


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in module.parameters() if p.requires_grad), lr=0.1, momentum=0.9)


def _evaluated(model: nn.Module, batch: tuple[Any, ...]) -> float:
    model.eval()
    with torch.no_grad():
        loss = float(model(*batch))
    model.train()
    return loss


def train_from_own_values(subject: Subject) -> _Story:
    """Build a module from a seed of this rank's own, outside the context for it, and train it."""
    with subject.strategy() as strategy:
        strategy.seed_everything(0)
        torch.manual_seed(strategy.global_rank)
        built = _Assembled()
        model, (optimizer,) = strategy.setup_module_and_optimizers(built, [_sgd(built)])
        start = _look(strategy, model)
        losses = train_on(strategy, model, optimizer, _samples()).losses
        return _Story(start=start, losses=losses, end=_look(strategy, model))


def _look(strategy: Strategy, model: nn.Module) -> _Look:
    return _Look(
        weights=whole_weights(strategy, model),
        buffers=whole_buffers(strategy.unwrap(model)),
        loss=_evaluated(model, strategy.batch_to_device(_samples()[0])),
    )


@functools.cache
def _rank_zero_plainly() -> _Story:
    torch.manual_seed(0)
    model = _Assembled()
    optimizer = _sgd(model)
    start = _look_plainly(model)
    losses = []
    for batch in _samples():
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return _Story(start=start, losses=losses, end=_look_plainly(model))


def _look_plainly(model: nn.Module) -> _Look:
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return _Look(weights=weights, buffers=whole_buffers(model), loss=_evaluated(model, _samples()[0]))


class _Watching(nn.Module):
    """Keeps statistics of what it has seen; several, so that ranks that take turns do not all get it right."""

    mean: torch.Tensor
    squares: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.make("plain")
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("squares", torch.zeros(6, 6))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        _watch(self.mean, self.squares, inputs)
        loss: torch.Tensor = self.inner(inputs, targets)
        return loss


def _watch(mean: torch.Tensor, squares: torch.Tensor, inputs: torch.Tensor) -> None:
    mean.lerp_(inputs.mean(0), 0.25)
    squares.lerp_(inputs.T @ inputs, 0.25)


def _statistics_of_rank_zero(replicas: int) -> Tensors:
    mean, squares = torch.zeros(6), torch.zeros(6, 6)
    for batch in _samples():
        _watch(mean, squares, models.share(batch, 0, replicas)[0])
    return {"mean": mean, "squares": squares}


def gathers_statistics(subject: Subject, path: Path) -> tuple[int, dict[str, Tensors]]:
    """Train on this rank's share; return the number of shares, and the statistics as they are shown and come back."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, _Watching, _sgd)
        train_on(strategy, model, optimizer, _samples())
        kinds = {"what full_parameters shows": _statistics(whole_weights(strategy, model))}
        weights = strategy.module_state_dict(model)
        if strategy.is_global_zero:
            kinds["what a state dict holds"] = _statistics(weights)
        strategy.save_checkpoint(path, {"model": model, "optimizer": optimizer})
        strategy.load_checkpoint(path, {"model": model, "optimizer": optimizer})
        kinds["what comes back from a checkpoint"] = _statistics(whole_buffers(strategy.unwrap(model)))
        return strategy.distributed_sampler_kwargs["num_replicas"], kinds


def _statistics(tensors: Tensors) -> Tensors:
    return {name: tensors[name] for name in ("mean", "squares")}
