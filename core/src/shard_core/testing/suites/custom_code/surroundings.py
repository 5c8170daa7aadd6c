"""What a module is given and gives away: layers that come after setup, and objects in outputs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shard_core.errors import ShardError
from shard_core.testing import models, oracle
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.suites.training.runs import BATCH, Run, assert_like, device_of, train_on
from shard_core.testing.training import set_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shard_core.testing.strategy_under_test import Ranks, Subject

_STEPS = 3


class Surroundings(Suite):
    """What is put into a module, and what comes out of it, trains right or is refused."""

    @promise(after=("averages_gradients",), every_size=False)
    def test_layers_after_setup_train_or_are_refused(self, ranks: Ranks) -> None:
        """A layer that is put into a module after setup, and stepped, is trained alike on all ranks.

        A strategy may refuse it instead, before the step is over, with a ``ShardError`` that says what to do.

        Usual cause:
            Messages and hooks are made for what is there at setup; the gradients of an adapter that comes later stay
            on their rank, and ranks drift apart without a word.
        """
        self._assert_like_plain(ranks.run(train_with_adapter), _adapted_plainly())

    @promise(after=("averages_gradients",), every_size=False)
    def test_objects_in_outputs_train(self, ranks: Ranks) -> None:
        """A forward may return an object of the user's own with tensors for attributes, and a loss be made of these.

        A strategy may refuse it instead, before the step is over, with a ``ShardError`` that says what to do.

        Usual cause:
            Hooks for the backward are put on the tensors of tuples and dicts alone, so that it never reaches the
            module's parameters; steps are taken with no gradients, and the weights stay as they were.
        """
        self._assert_like_plain(ranks.run(train_through_objects), _objects_plainly())

    def _assert_like_plain(self, answers: Sequence[Run | str], truth: oracle.Trajectory) -> None:
        if all(isinstance(answer, str) for answer in answers):
            return
        assert not any(isinstance(answer, str) for answer in answers), f"only some ranks refused: {answers}"
        assert_like([answer for answer in answers if isinstance(answer, Run)], truth)


class _Extensible(nn.Module):
    """Puts its inputs through adapters, of which there are none at first."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList()
        self.inner = models.make("plain")

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for adapter in self.adapters:
            inputs = inputs + adapter(inputs)
        loss: torch.Tensor = self.inner(inputs, targets)
        return loss

    def extend(self, device: torch.device | str = "cpu") -> list[nn.Parameter]:
        """Add an adapter where forwards compute, and return its parameters."""
        adapter = nn.Linear(6, 6)
        nn.init.constant_(adapter.weight, 0.1)
        nn.init.zeros_(adapter.bias)
        self.adapters.append(adapter.to(device))
        return list(adapter.parameters())


class _Output:
    """An object of a user's own."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class _Wrapping(nn.Module):
    """Returns an object that holds the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.make("plain")

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> _Output:
        return _Output(self.inner(inputs, targets))


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def _extended(module: Any) -> torch.optim.Optimizer:
    """Build the optimizer and extend the module by what it steps, too."""
    optimizer = _sgd(module)
    optimizer.add_param_group({"params": module.extend()})
    return optimizer


@functools.cache
def _adapted_plainly() -> oracle.Trajectory:
    return oracle.train(_Extensible, _extended, models.batches("plain", _STEPS, BATCH))


@functools.cache
def _objects_plainly() -> oracle.Trajectory:
    def loss_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return _loss(model(*batch))

    return oracle.train(_Wrapping, _sgd, models.batches("plain", _STEPS, BATCH), loss_of=loss_of)


def _loss(output: _Output) -> torch.Tensor:
    return output.loss


def train_with_adapter(subject: Subject) -> Run | str:
    """Train with an adapter that was put in after setup, or return the strategy's error."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, _Extensible, _sgd)
        try:
            own: Any = strategy.unwrap(model)
            optimizer.add_param_group({"params": own.extend(device_of(strategy))})
            return train_on(strategy, model, optimizer, models.batches("plain", _STEPS, BATCH))
        except ShardError as refusal:
            return str(refusal)


def train_through_objects(subject: Subject) -> Run | str:
    """Train by losses that the forward returns inside objects, or return the strategy's error."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, _Wrapping, _sgd)
        try:
            return train_on(strategy, model, optimizer, models.batches("plain", _STEPS, BATCH), _loss)
        except ShardError as refusal:
            return str(refusal)
