"""Training gives what plain PyTorch gives in one process."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shard_core.errors import ShardError
from shard_core.testing import models, oracle
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.suites.training.runs import BATCH, Run, assert_like, plainly, train_on
from shard_core.testing.training import set_up, step, whole_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard_core.testing.strategy_under_test import Ranks, Subject

_STEPS = 5


class Parity(Suite):
    """Losses and weights of plain PyTorch in one process."""

    @promise(after=("optimizer_made_before_or_after_setup", "param_groups_keep_their_settings"))
    def test_averages_gradients(self, ranks: Ranks) -> None:
        """A step's gradient is the mean over all data-parallel ranks.

        Usual cause:
            Gradients are summed, averaged twice or left on their rank; AdamW hides it, SGD does not.
        """
        truth = _one_step_of_sgd()
        for weights in ranks.run(one_step_of_sgd):
            oracle.assert_same_weights(weights, truth, 1e-6, elementwise=True)

    @promise(after=("averages_gradients",))
    def test_plain_backward_is_right_or_refused(self, ranks: Ranks) -> None:
        """A loop that was ported by halves and calls ``loss.backward()`` trains right, or ends in a ``ShardError``.

        Usual cause:
            Gradients are averaged by the strategy's ``backward`` alone, and nothing notices those that come past it.
        """
        answers = ranks.run(train_past_the_strategy)
        if all(isinstance(answer, str) for answer in answers):
            return
        assert not any(isinstance(answer, str) for answer in answers), f"only some ranks refused: {answers}"
        assert_like(answers, _trained("uneven", "sgd"))

    @pytest.mark.parametrize(
        ("model", "optimizer"),
        [
            ("transformer", "adamw"),
            ("transformer", "sgd"),
            ("uneven", "sgd"),
            ("uneven", "adagrad"),
            ("scalar", "sgd"),  # adaptive optimizers would hide a wrong factor
        ],
    )
    @promise(after=("averages_gradients", "optimizer_state_moves_along"))
    def test_trains_like_plain_pytorch(self, ranks: Ranks, model: str, optimizer: str) -> None:
        """Losses and weights over several steps are those of one process: whatever the shapes and the optimizer.

        Usual cause:
            A parameter that does not divide by the ranks, or has no dimension, is left out of the average or
            of the shards; or optimizer state that exists before the first step is laid out for whole parameters.
        """
        assert_like(ranks.run(train_model, model, optimizer), _trained(model, optimizer))

    @pytest.mark.parametrize("model", ["transformer", "scaled"])
    @promise(after=("averages_gradients",))
    def test_several_forwards_per_backward(self, ranks: Ranks, model: str) -> None:
        """One backward may follow several forwards of the module, as in contrastive training.

        Usual cause:
            Each forward resets what backward waits for, or changes buffers in place that an earlier forward's
            backward still reads.
        """
        assert_like(ranks.run(train_on_halves, model), _trained(model, "sgd"))

    @pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
    @promise(after=("averages_gradients",))
    def test_evaluation_in_between(self, ranks: Ranks, mode: str) -> None:
        """Forwards without gradients, between the calls of a training step too, are right and leave training as it is.

        Usual cause:
            A forward without a backward leaves parameters gathered, so that the next one misses the step in between,
            or hooks waiting; or ``eval()`` on what setup returned does not reach the user's module.
        """
        truth = _trained("watching", "sgd")
        answers = ranks.run(evaluate_between_steps, mode)
        assert_like([run for run, _ in answers], truth)
        means = [sum(losses) / len(losses) for losses in zip(*(losses for _, losses in answers), strict=True)]
        tripled = [3 * loss for loss in truth.losses]
        oracle.assert_same_numbers("the ranks' mean loss in evaluation", means, tripled, 1e-6)

    @pytest.mark.parametrize("what", ["weights", "gradients", "zeros"])
    @promise(after=("averages_gradients",), every_size=False)
    def test_changes_by_hand_count(self, ranks: Ranks, what: str) -> None:
        """What users do to ``parameters()`` and their gradients counts: changing either, and ``module.zero_grad()``.

        A strategy may refuse it instead, before the next step is over, with a ``ShardError`` that says what to do.

        Usual cause:
            The engine steps tensors of its own and writes them over the module's, or keeps gradients elsewhere.
        """
        self._assert_by_hand(ranks, what)

    @promise(after=("averages_gradients", "changes_by_hand_count"), every_size=False)
    def test_assigned_data_counts(self, ranks: Ranks) -> None:
        """Parameters whose ``.data`` is assigned, as ``parameter.data = parameter.data * 0.9``, have the new values.

        A strategy may refuse it instead, before the next step is over, with a ``ShardError`` that says what to do.

        Usual cause:
            Parameters are wrappers of what the engine computes with, and only the wrapper's outside is assigned.
        """
        self._assert_by_hand(ranks, "data")

    def _assert_by_hand(self, ranks: Ranks, what: str) -> None:
        answers = ranks.run(train_by_hand, what)
        if all(isinstance(answer, str) for answer in answers):
            return
        assert not any(isinstance(answer, str) for answer in answers), f"only some ranks refused: {answers}"
        assert_like(answers, _trained_by_hand(what))


class _Scaled(nn.Module):
    """A constant buffer stands between two layers: backward reads it."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.second(torch.tanh(self.first(inputs)) * self.scale), targets)


class _Watching(nn.Module):
    """In evaluation the loss is three times as large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.make("plain")

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(inputs, targets)
        return loss if self.training else loss * 3


def _transformer() -> nn.Module:
    """Build the GPT of the zoo with an output layer of its own: ties are another promise."""
    model = models.make("gpt")
    head = model.head
    assert isinstance(head, nn.Linear)
    model.head = nn.Linear(head.in_features, head.out_features, bias=False)
    return model


_OWN: dict[str, Callable[[], nn.Module]] = {"transformer": _transformer, "scaled": _Scaled, "watching": _Watching}


def _make(name: str) -> nn.Module:
    return _OWN[name]() if name in _OWN else models.make(name)


def _batches(model: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return models.batches("gpt" if model == "transformer" else "plain", _STEPS, BATCH)


@functools.cache
def _trained(model: str, optimizer: str) -> oracle.Trajectory:
    return oracle.train(lambda: _make(model), lambda module: models.make_optimizer(optimizer, module), _batches(model))


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5)


@functools.cache
def _one_step_of_sgd() -> dict[str, torch.Tensor]:
    return plainly("plain", _sgd, 1).weights


def one_step_of_sgd(subject: Subject) -> dict[str, torch.Tensor]:
    """Take one step on this rank's share and return the whole weights."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, "plain", _sgd)
        (batch,) = models.batches("plain", 1, BATCH)
        step(strategy, model, optimizer, batch)
        return whole_weights(strategy, model)


def _change(what: str, at: str, model: nn.Module) -> None:
    """Change by hand what was asked for, if this is the place for it: before or after a step."""
    with torch.no_grad():
        for parameter in model.parameters():
            if (what, at) == ("gradients", "before") and parameter.grad is not None:
                parameter.grad.mul_(0.5)
            elif (what, at) == ("weights", "after"):
                parameter.mul_(0.9)
            elif (what, at) == ("data", "after"):
                parameter.data = parameter.data * 0.9
    if (what, at) == ("zeros", "after"):
        model.zero_grad()


@functools.cache
def _trained_by_hand(what: str) -> oracle.Trajectory:
    torch.manual_seed(0)
    model = _make("plain")
    optimizer = models.make_optimizer("sgd", model)
    losses = []
    for batch in _batches("plain"):
        loss = model(*batch)
        loss.backward()
        _change(what, "before", model)
        optimizer.step()
        _change(what, "after", model)
        if what != "zeros":
            optimizer.zero_grad()
        losses.append(loss.item())
    return oracle.Trajectory(losses=losses, norms=[], weights=model.state_dict())


def train_by_hand(subject: Subject, what: str) -> Run | str:
    """Train with changes by hand, or return the strategy's error."""
    losses = []
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, "plain", "sgd")
        try:
            for batch in _batches("plain"):
                loss = model(*models.share_of(strategy, batch))
                strategy.backward(loss, model)
                _change(what, "before", model)
                strategy.optimizer_step(optimizer)
                _change(what, "after", model)
                if what != "zeros":
                    optimizer.zero_grad()
                losses.append(loss.item())
        except ShardError as refusal:
            return str(refusal)
        return Run(losses=losses, weights=whole_weights(strategy, model))


def train_past_the_strategy(subject: Subject) -> Run | str:
    """Train with backwards that the strategy is not asked for, or return its error."""
    losses = []
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, "uneven", "sgd")
        try:
            for batch in _batches("uneven"):
                loss = model(*models.share_of(strategy, batch))
                loss.backward()
                strategy.optimizer_step(optimizer)
                optimizer.zero_grad()
                losses.append(loss.item())
        except ShardError as refusal:
            return str(refusal)
        return Run(losses=losses, weights=whole_weights(strategy, model))


def train_model(subject: Subject, model: str, optimizer: str) -> Run:
    """Take a few steps on this rank's shares."""
    with subject.strategy() as strategy:
        ready, stepped = set_up(strategy, functools.partial(_make, model), optimizer)
        return train_on(strategy, ready, stepped, _batches(model))


def train_on_halves(subject: Subject, name: str) -> Run:
    """Take steps whose loss is the mean of two forwards, each on about half of this rank's share."""
    losses = []
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, functools.partial(_make, name), "sgd")
        for batch in _batches(name):
            inputs, targets = models.share_of(strategy, batch)
            half = len(inputs) // 2
            weight = half / len(inputs)
            loss = weight * model(inputs[:half], targets[:half]) + (1 - weight) * model(inputs[half:], targets[half:])
            strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(loss.item())
        return Run(losses=losses, weights=whole_weights(strategy, model))


def evaluate_between_steps(subject: Subject, mode: str) -> tuple[Run, list[float]]:
    """Evaluate before each step on the batch it will train on, and again before and after its backward."""
    without_gradients: Callable[[], contextlib.AbstractContextManager[Any]] = getattr(torch, mode)
    losses, evaluated = [], []
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, _Watching, "sgd")
        for batch in _batches("watching"):
            share = models.share_of(strategy, batch)
            model.eval()
            with without_gradients():
                evaluated.append(model(*share).item())
            model.train()
            loss = model(*share)
            with without_gradients():
                model(*share)
            strategy.backward(loss, model)
            with without_gradients():
                model(*share)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(loss.item())
        return Run(losses=losses, weights=whole_weights(strategy, model)), evaluated
