"""Tied, frozen and unused parameters and buffers stay what they are."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from shard_core.capability import Capability
from shard_core.errors import SetupError, ShardError
from shard_core.testing import models, oracle
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.suites.training.runs import BATCH, Run, assert_like, plainly, train, train_on, whole_buffers
from shard_core.testing.training import set_up, whole_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard_core.testing.strategy_under_test import Ranks, Subject

_STEPS = 4
_TIED = ("embedding.weight", "head.weight")


class Structure(Suite):
    """What a module is made of survives setup and training."""

    @promise(after=("averages_gradients", "trains_like_plain_pytorch"))
    def test_ties_stay_tied(self, ranks: Ranks) -> None:
        """A parameter that two layers share stays one, with the gradients of both, or setup refuses it by name.

        Usual cause:
            Layers are sharded, copied or given memory one by one, so each gets a parameter of its own and half
            of the gradient; nothing fails, the embedding just learns worse.
        """
        answers = ranks.run(train_tied)
        refusals = [answer for answer in answers if isinstance(answer, str)]
        runs = [answer for answer in answers if isinstance(answer, Run)]
        for message in refusals:
            assert any(name in message for name in _TIED), f"the refusal names none of {_TIED}: {message}"
        assert not (refusals and runs), "only some ranks refused the tie"
        for run in runs:
            # Whole weights may name a tied parameter once.
            named = [run.weights[name] for name in _TIED if name in run.weights]
            assert all(torch.equal(one, named[0]) for one in named), f"{' and '.join(_TIED)} have grown apart"
            run.weights.update(dict.fromkeys(_TIED, named[0]))
        if runs:
            assert_like(runs, _trained("gpt", "sgd"))

    @promise(after=("averages_gradients",))
    def test_frozen_parameters_stay_frozen(self, ranks: Ranks) -> None:
        """Parameters that need no gradient keep their very bits, also in an optimizer with weight decay.

        Usual cause:
            Frozen and trained parameters are joined into one flat tensor, which is stepped or decayed as a whole;
            or parameters are re-made with ``requires_grad=True``.
        """
        truth = _trained("frozen", _decaying)
        runs = ranks.run(train, "frozen", _decaying, _STEPS)
        for run in runs:
            frozen = {name: run.weights[name] for name in ("first.weight", "first.bias")}
            oracle.assert_same_weights(frozen, {name: truth.weights[name] for name in frozen}, 0)
        assert_like(runs, truth)

    @promise(needs=Capability.UNFREEZE, after=("averages_gradients", "frozen_parameters_stay_frozen"))
    def test_unfrozen_parameters_train(self, ranks: Ranks) -> None:
        """Parameters that are frozen at setup and unfrozen between steps train from then on.

        Usual cause:
            Messages, shards or hooks are made for what is to be trained at setup; the gradients of all else stay
            on their rank, whose weights drift apart from the others' without a word.
        """
        assert_like(ranks.run(train_unfreezing), _unfrozen_plainly())

    @pytest.mark.parametrize("when", ["never", "sometimes"])
    @promise(after=("averages_gradients",))
    def test_unused_parameters_keep_their_values(self, ranks: Ranks, when: str) -> None:
        """Parameters that a loss does not reach keep their very bits in that step and the others train right.

        A strategy may refuse such a loss instead, before the step, with a ``ShardError`` that says what to do.

        Usual cause:
            Messages wait for gradients that never come, so whole buckets stay on their rank or the next forward
            fails; or missing gradients become zeros, which weight decay and momentum step with.
        """
        make = _MAKERS[when]
        truth = _trained(make, _decaying)
        answers = ranks.run(train_unused, make)
        if all(isinstance(answer, str) for answer in answers):
            return
        assert not any(isinstance(answer, str) for answer in answers), f"only some ranks refused: {answers}"
        for run in answers if when == "never" else ():
            unused = {name: run.weights[name] for name in run.weights if name.startswith("unused.")}
            oracle.assert_same_weights(unused, {name: truth.weights[name] for name in unused}, 0)
        assert_like(answers, truth)

    @promise(after=("averages_gradients", "unused_parameters_keep_their_values"))
    def test_ranks_may_use_different_parameters(self, ranks: Ranks) -> None:
        """Where each rank's loss runs through other layers, gradients are the mean over all ranks all the same.

        A rank whose loss does not reach a parameter counts as zero. A strategy may refuse such losses instead, on
        every rank and before the step, with a ``ShardError`` that says what to do.

        Usual cause:
            The gradients of several parameters are sent as one message and added up by their places in it, so a
            rank's gradient of one layer is averaged with another rank's of another; or they are divided by the
            number of ranks that have one.
        """
        answers = ranks.run(train_either)
        if all(isinstance(answer, str) for answer in answers):
            return
        assert not any(isinstance(answer, str) for answer in answers), f"only some ranks refused: {answers}"
        assert_like([run for run, _ in answers], _either_plainly(answers[0][1]))

    @promise(after=("averages_gradients",))
    def test_buffers_are_right(self, ranks: Ranks) -> None:
        """Buffers keep values and dtypes on every rank, persistent or not, and change once a forward.

        Usual cause:
            Buffers are not given memory or values when the module is built without any, are cast or averaged like
            parameters, or those with ``persistent=False`` are forgotten because no state dict has them.
        """
        truth = _buffers_plainly()
        answers = ranks.run(train_buffers)
        for _, buffers in answers:
            oracle.assert_same_weights(buffers, truth, 0)
        assert_like([run for run, _ in answers], _trained("buffers", "sgd"))

    @promise(after=("averages_gradients",))
    def test_sparse_embeddings_train(self, ranks: Ranks) -> None:
        """An embedding that was made with ``sparse=True`` trains as in plain PyTorch, beside layers without.

        Usual cause:
            Sparse gradients cannot be sent and stay on their rank, or are divided by the number of ranks once more than
            dense ones.
        """
        assert_like(ranks.run(train, _Words, _rolling, _STEPS), _words_plainly())


class _Words(nn.Module):
    """An embedding with sparse gradients, some of whose rows a batch leaves out, before layers without."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6, sparse=True)
        self.inner = models.make("plain")

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows = (3 * inputs.sum(-1)).long() % 5
        loss: torch.Tensor = self.inner(inputs + self.table(rows), targets)
        return loss


class _Sometimes(nn.Module):
    """A layer that only every second step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.make("plain")
        self.unused = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss: torch.Tensor = self.inner(inputs if self.calls % 2 else self.unused(inputs), targets)
        return loss


class _Either(nn.Module):
    """One of two layers of one size is used, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.make("plain")
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, side: int) -> torch.Tensor:
        layer = self.right if side else self.left
        loss: torch.Tensor = self.inner(layer(inputs), targets)
        return loss


def _never() -> nn.Module:
    return models.make("unused")


def _sometimes() -> nn.Module:
    return _Sometimes()


_MAKERS: dict[str, Callable[[], nn.Module]] = {"never": _never, "sometimes": _sometimes}


def _decaying(module: nn.Module) -> torch.optim.Optimizer:
    """Build an optimizer with weight decay over all parameters, trained or not."""
    return torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.5)


def _descending(module: nn.Module) -> torch.optim.Optimizer:
    """Build an optimizer that hides no wrong scale over all parameters, trained or not."""
    return torch.optim.SGD(module.parameters(), lr=0.1)


def _rolling(module: nn.Module) -> torch.optim.Optimizer:
    """Build an optimizer that moves rows on that a gradient has left out."""
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


@functools.cache
def _words_plainly() -> oracle.Trajectory:
    torch.manual_seed(0)
    model = _Words()
    optimizer = _rolling(model)
    losses = []
    for batch in models.batches("plain", _STEPS, BATCH):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    return oracle.Trajectory(losses=losses, norms=[], weights=weights)


@functools.cache
def _trained(
    model: str | Callable[[], nn.Module], optimizer: str | Callable[[nn.Module], torch.optim.Optimizer]
) -> oracle.Trajectory:
    return plainly(model, optimizer, _STEPS)


def train_tied(subject: Subject) -> Run | str:
    """Train a tied model, or return setup's error."""
    with subject.strategy() as strategy:
        try:
            model, optimizer = set_up(strategy, "gpt", "sgd")
        except SetupError as refusal:
            return str(refusal)
        return train_on(strategy, model, optimizer, models.batches("gpt", _STEPS, BATCH))


@functools.cache
def _unfrozen_plainly() -> oracle.Trajectory:
    steps = itertools.count()

    def loss_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if next(steps) == _STEPS // 2:
            model.requires_grad_(True)
        loss: torch.Tensor = model(*batch)
        return loss

    batches = models.batches("frozen", _STEPS, BATCH)
    return oracle.train(lambda: models.make("frozen"), _descending, batches, loss_of=loss_of)


def train_unfreezing(subject: Subject) -> Run:
    """Unfreeze everything after half of the steps."""
    batches = models.batches("frozen", _STEPS, BATCH)
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, "frozen", _descending)
        before = train_on(strategy, model, optimizer, batches[: _STEPS // 2])
        strategy.unwrap(model).requires_grad_(True)
        after = train_on(strategy, model, optimizer, batches[_STEPS // 2 :])
        return Run(losses=before.losses + after.losses, weights=after.weights)


def train_unused(subject: Subject, make: Callable[[], nn.Module]) -> Run | str:
    """Train a model some of whose parameters get no gradient, or return the strategy's error."""
    try:
        return train(subject, make, _decaying, _STEPS)
    except ShardError as refusal:
        return str(refusal)


def train_either(subject: Subject) -> tuple[Run, int] | str:
    """Train with another layer on every second data rank, or return the strategy's error.

    Returns:
        The run and the number of data ranks.
    """
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, _Either, _descending)
        data = strategy.distributed_sampler_kwargs
        losses = []
        for step, batch in enumerate(models.batches("plain", _STEPS, BATCH)):
            try:
                loss = model(*models.share_of(strategy, batch), (data["rank"] + step) % 2)
                strategy.backward(loss, model)
                strategy.optimizer_step(optimizer)
            except ShardError as refusal:
                return str(refusal)
            optimizer.zero_grad()
            losses.append(loss.item())
        return Run(losses=losses, weights=whole_weights(strategy, model)), data["num_replicas"]


@functools.cache
def _either_plainly(data_ranks: int) -> oracle.Trajectory:
    steps = itertools.count()

    def loss_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        step = next(steps)
        shares = [models.share(batch, rank, data_ranks) for rank in range(data_ranks)]
        return torch.stack([model(*share, (rank + step) % 2) for rank, share in enumerate(shares)]).mean()

    return oracle.train(_Either, _descending, models.batches("plain", _STEPS, BATCH), loss_of=loss_of)


@functools.cache
def _buffers_plainly() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = models.make("buffers")
    for batch in models.batches("buffers", _STEPS, BATCH):
        model(*batch)
    return whole_buffers(model)


def train_buffers(subject: Subject) -> tuple[Run, dict[str, torch.Tensor]]:
    """Train a model with buffers and return them as this rank has them."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, "buffers", "sgd")
        run = train_on(strategy, model, optimizer, models.batches("buffers", _STEPS, BATCH))
        return run, whole_buffers(strategy.unwrap(model))
