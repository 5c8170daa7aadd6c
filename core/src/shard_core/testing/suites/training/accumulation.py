"""Gradients of several micro-batches add up to that of one large batch."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from shard_core.capability import Capability
from shard_core.testing import models, oracle, plain_descent
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.training import set_up

if TYPE_CHECKING:
    from shard_core.strategy import Strategy
    from shard_core.testing.strategy_under_test import Ranks, Subject

_MODEL, _BATCH, _MICRO, _STEPS = "uneven", 12, 3, 2
_BOUND = 1e-5

#: Samples of each data rank in each micro-batch; ranks beyond take from the front again.
_RAGGED = ((9, 1, 4), (2, 7, 3))


class Accumulation(Suite):
    """Gradients of several micro-batches add up to that of one large batch."""

    @promise(after=("averages_gradients",))
    def test_micro_batches_add_up(self, ranks: Ranks) -> None:
        """Gradients of several backwards are summed until the step, and nobody divides but the user.

        Usual cause:
            The engine divides by a number of micro-batches of its own, backward replaces the gradient that is
            there, or what was accumulated for one step leaks into the next.
        """
        for steps in ranks.run(accumulated):
            _assert_same_steps(steps, _gradients_of_large_batches())

    @promise(after=("averages_gradients", "micro_batches_add_up"), every_size=False)
    def test_backward_takes_a_gradient(self, ranks: Ranks) -> None:
        """A tensor that is no scalar goes backward with ``gradient=``, a later stage's by it, as in plain PyTorch.

        Usual cause:
            The keyword is dropped and the tensor reduced, or gradients of such a backward are not averaged.
        """
        for steps in ranks.run(weighed):
            _assert_same_steps(steps, _gradients_of_weighed_batches())

    @promise(needs=Capability.DEFER_SYNC, after=("averages_gradients", "micro_batches_add_up"))
    def test_deferring_changes_nothing(self, ranks: Ranks) -> None:
        """Leaving gradients on their rank for all but the last micro-batch gives the same gradient.

        Usual cause:
            What was deferred is never averaged, is averaged twice, or ``enabled=False`` defers all the same.
        """
        for steps in ranks.run(deferred):
            _assert_same_steps(steps, _gradients_of_large_batches())

    @promise(needs=Capability.DEFER_SYNC, after=("deferring_changes_nothing",), every_size=False)
    def test_deferring_saves_traffic(self, ranks: Ranks) -> None:
        """A backward inside ``no_backward_sync`` sends fewer messages than one outside.

        Usual cause:
            ``no_backward_sync`` does nothing, though ``DEFER_SYNC`` is declared.
        """
        for rank, (inside, outside) in enumerate(ranks.run(messages)):
            assert inside < outside or outside == 0, (
                f"rank {rank} sent {inside} messages in a deferred backward and {outside} in another"
            )

    @promise(needs=Capability.DENOMINATOR, after=("averages_gradients", "micro_batches_add_up"))
    def test_denominator_gives_the_global_mean(self, ranks: Ranks) -> None:
        """With sums as losses and counts as denominators the gradient is that of the mean over all samples.

        Usual cause:
            The denominator is ignored, used per micro-batch or per rank, or the average over ranks is left in.
        """
        for steps in ranks.run(counted):
            _assert_same_steps(steps, _gradients_of_large_batches())

    @promise(needs=Capability.DENOMINATOR, after=("denominator_gives_the_global_mean",))
    def test_ragged_batches_weigh_by_their_size(self, ranks: Ranks) -> None:
        """Every sample weighs the same, however many its rank has and whichever micro-batch it is in.

        Usual cause:
            Each rank or each micro-batch divides by its own count before gradients are averaged.
        """
        for gradients, data_ranks in ranks.run(ragged):
            oracle.assert_same_weights(gradients, _gradients_of_ragged_batches(data_ranks), _BOUND, elementwise=True)


def _assert_same_steps(steps: list[dict[str, torch.Tensor]], truth: list[dict[str, torch.Tensor]]) -> None:
    for gradients, expected in zip(steps, truth, strict=True):
        oracle.assert_same_weights(gradients, expected, _BOUND, elementwise=True)


@functools.cache
def _gradients_of_large_batches() -> list[dict[str, torch.Tensor]]:
    """Compute each step's gradients in plain PyTorch, its micro-batches as one batch."""
    torch.manual_seed(0)
    model = models.make(_MODEL)
    optimizer = plain_descent.make_optimizer(model)
    steps = []
    for micro_batches in _batches():
        model(*map(torch.cat, zip(*micro_batches, strict=True))).backward()
        steps.append(plain_descent.gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return steps


@functools.cache
def _gradients_of_weighed_batches() -> list[dict[str, torch.Tensor]]:
    """Compute the gradients of the same backwards in plain PyTorch."""
    torch.manual_seed(0)
    model = models.make(_MODEL)
    optimizer = plain_descent.make_optimizer(model)
    steps = []
    for micro_batches in _batches():
        for batch in micro_batches:
            model(*batch, reduction="none").backward(gradient=_weights(batch))
        steps.append(plain_descent.gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return steps


def _weights(batch: tuple[Any, ...]) -> torch.Tensor:
    """Draw what a later stage would have made of the losses of a batch, small as for a mean."""
    targets: torch.Tensor = batch[1]
    return torch.randn(targets.shape, generator=torch.Generator().manual_seed(1)) / targets.numel()


@functools.cache
def _gradients_of_ragged_batches(data_ranks: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = models.make(_MODEL)
    model(*_ragged_batch(data_ranks)).backward()
    return plain_descent.gradients(model)


def _batches() -> list[list[tuple[Any, ...]]]:
    """Draw the global micro-batches of each step."""
    drawn = models.batches(_MODEL, _STEPS * _MICRO, _BATCH)
    return [list(drawn[start : start + _MICRO]) for start in range(0, len(drawn), _MICRO)]


def _ragged_sizes(micro: int, data_ranks: int) -> list[int]:
    return [_RAGGED[micro][rank % len(_RAGGED[micro])] for rank in range(data_ranks)]


def _ragged_batch(data_ranks: int) -> tuple[Any, ...]:
    total = sum(sum(_ragged_sizes(micro, data_ranks)) for micro in range(len(_RAGGED)))
    return models.batches(_MODEL, 1, total)[0]


def accumulated(subject: Subject) -> list[dict[str, torch.Tensor]]:
    """Accumulate over micro-batches and return the gradient of each step."""
    with subject.strategy() as strategy:
        return _steps(strategy, defer=None)


def weighed(subject: Subject) -> list[dict[str, torch.Tensor]]:
    """Accumulate over backwards from each sample's losses and return the gradient of each step."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, _MODEL, plain_descent.make_optimizer)
        data_ranks = strategy.distributed_sampler_kwargs["num_replicas"]
        steps = []
        for micro_batches in _batches():
            for batch in micro_batches:
                *mine, weights = models.share_of(strategy, (*batch, _weights(batch)))
                losses = model(*mine, reduction="none")
                strategy.backward(losses, model, gradient=weights * data_ranks)  # ranks average
            steps.append(plain_descent.take_step(strategy, model, optimizer))
        return steps


def deferred(subject: Subject) -> list[dict[str, torch.Tensor]]:
    """Accumulate, deferring in the first step only, and return the gradient of each step."""
    with subject.strategy() as strategy:
        return _steps(strategy, defer=0)


def _steps(strategy: Strategy, defer: int | None) -> list[dict[str, torch.Tensor]]:
    model, optimizer = set_up(strategy, _MODEL, plain_descent.make_optimizer)
    steps = []
    for step, micro_batches in enumerate(_batches()):
        for number, batch in enumerate(micro_batches):
            waits = step == defer and number < _MICRO - 1
            with contextlib.nullcontext() if defer is None else strategy.no_backward_sync(model, enabled=waits):
                strategy.backward(model(*models.share_of(strategy, batch)) / _MICRO, model)
        steps.append(plain_descent.take_step(strategy, model, optimizer))
    return steps


def messages(subject: Subject) -> tuple[int, int]:
    """Count the messages of a deferred backward and of one that is not."""
    with subject.strategy() as strategy:
        model, _ = set_up(strategy, _MODEL, plain_descent.make_optimizer)
        batch = models.share_of(strategy, _batches()[0][0])
        # The first backward of an engine may send more than the later ones.
        strategy.backward(model(*batch), model)
        return _messages(strategy, model, batch, defer=True), _messages(strategy, model, batch, defer=False)


def _messages(strategy: Strategy, model: torch.nn.Module, batch: tuple[Any, ...], *, defer: bool) -> int:
    with strategy.no_backward_sync(model, enabled=defer):
        loss = model(*batch)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            strategy.backward(loss, model)
    return sum(event.name.startswith("c10d::") for event in profile.events())


def counted(subject: Subject) -> list[dict[str, torch.Tensor]]:
    """Accumulate sums with their counts, as numbers and as tensors, and return the gradient of each step."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, _MODEL, plain_descent.make_optimizer)
        steps = []
        for step, micro_batches in enumerate(_batches()):
            for batch in micro_batches:
                inputs, targets = models.share_of(strategy, batch)
                count = targets.numel() if step == 0 else torch.tensor(targets.numel(), device=targets.device)
                strategy.backward(model(inputs, targets, reduction="sum"), model, denominator=count)
            steps.append(plain_descent.take_step(strategy, model, optimizer))
        return steps


def ragged(subject: Subject) -> tuple[dict[str, torch.Tensor], int]:
    """Take one step on shares of other sizes; return the gradient and how many shares there were."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, _MODEL, plain_descent.make_optimizer)
        data = strategy.distributed_sampler_kwargs
        whole = _ragged_batch(data["num_replicas"])
        begin = 0
        for micro in range(len(_RAGGED)):
            sizes = _ragged_sizes(micro, data["num_replicas"])
            first = begin + sum(sizes[: data["rank"]])
            begin += sum(sizes)
            mine = tuple(tensor[first : first + sizes[data["rank"]]] for tensor in whole)
            inputs, targets = strategy.batch_to_device(mine)
            strategy.backward(model(inputs, targets, reduction="sum"), model, denominator=targets.numel())
        return plain_descent.take_step(strategy, model, optimizer), data["num_replicas"]
