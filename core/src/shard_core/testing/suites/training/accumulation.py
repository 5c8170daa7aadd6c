"""Gradients of several micro-batches add up to that of one large batch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shard_core.capability import Capability
from shard_core.errors import SetupError, ShardError
from shard_core.testing import models, oracle, plain_descent
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.training import set_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shard_core.strategy import Strategy
    from shard_core.testing.strategy_under_test import Ranks, Subject

_MODEL, _BATCH, _MICRO, _STEPS = "uneven", 12, 3, 2
_BOUND = 1e-5

#: Samples of each data rank in each micro-batch; ranks beyond take from the front again.
_RAGGED = ((9, 1, 4), (2, 7, 3))


class Sent(NamedTuple):
    """What a rank sent in one backward.

    Attributes:
        elements: Of tensors.
        messages: Calls of collectives.
    """

    elements: int
    messages: int

    def __str__(self) -> str:
        return f"{self.elements} elements in {self.messages} messages"


_NOTHING = Sent(0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a rank sent in a backward inside ``no_backward_sync`` and in one outside.

    Attributes:
        inside: The one.
        outside: The other.
        lines: What was logged of ``no_backward_sync``.
    """

    inside: Sent
    outside: Sent
    lines: list[str]


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

    @promise(after=("averages_gradients", "micro_batches_add_up"))
    def test_deferring_changes_nothing(self, ranks: Ranks) -> None:
        """All but the last micro-batch inside ``no_backward_sync``, legal under every strategy, give the same gradient.

        Usual cause:
            What was deferred is never averaged, is averaged twice, or ``enabled=False`` defers all the same; or a
            strategy that cannot defer refuses the call.
        """
        for steps in ranks.run(deferred):
            _assert_same_steps(steps, _gradients_of_large_batches())

    @promise(after=("deferring_changes_nothing",), every_size=False)
    def test_deferring_saves_traffic(self, ranks: Ranks) -> None:
        """Backwards inside ``no_backward_sync`` send less, or without ``DEFER_SYNC`` as much, which one line then says.

        Usual cause:
            ``no_backward_sync`` does nothing, though ``DEFER_SYNC`` is declared, or without a word.
        """
        declared = Capability.DEFER_SYNC in self.info.capabilities
        answers = ranks.run(traffic)
        lines = answers[0].lines
        for rank, answer in enumerate(answers):
            inside, outside = answer.inside, answer.outside
            sent = f"rank {rank} sent {inside} in a backward inside no_backward_sync and {outside} in one outside"
            if declared or not lines:
                assert inside < outside or outside == _NOTHING, f"{sent}, and nothing was logged of that"
            else:
                assert inside == outside, f"{sent}, though this was logged: {lines[0]}"
            most = 1 if rank == 0 and not declared else 0
            assert len(answer.lines) <= most, f"rank {rank} logged this, which one line of rank 0 says: {answer.lines}"

    @promise(after=("deferring_changes_nothing",))
    def test_step_inside_is_refused(self, ranks: Ranks) -> None:
        """Clipping and stepping right after a backward inside ``no_backward_sync`` are refused, deferred or not.

        Usual cause:
            The gradients of one rank are stepped with, so that replicas drift apart; or the refusal is left to engines
            that defer, so that a loop runs under one strategy and not under the next.
        """
        for rank, answers in enumerate(ranks.run(stepped_inside)):
            for call, answer in answers.items():
                assert "no_backward_sync" in answer, f"rank {rank}: {call} {answer or 'did not raise SetupError'}"

    @promise(after=("deferring_changes_nothing",))
    def test_discarded_gradients_stay_away(self, ranks: Ranks) -> None:
        """What ``zero_grad`` throws away between deferred micro-batches is in no later step.

        The next backward may be refused instead with a ``ShardError``; what was thrown away is gone then, too.

        Usual cause:
            Deferred gradients wait in tensors of the engine's own, where ``zero_grad`` does not reach them.
        """
        for gradients in ranks.run(discarded):
            oracle.assert_same_weights(gradients, _gradients_of_large_batches()[0], _BOUND, elementwise=True)

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


def traffic(subject: Subject) -> Traffic:
    """Count what backwards inside and outside send, and keep what is logged of it."""
    with subject.strategy() as strategy, _logged() as lines:
        model, optimizer = set_up(strategy, _MODEL, plain_descent.make_optimizer)
        batch = models.share_of(strategy, _batches()[0][0])
        # The first backwards of an engine may send more than the later ones.
        for _ in range(2):
            strategy.backward(model(*batch), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        inside, outside = (_sent(strategy, model, batch, inside=inside) for inside in (True, False))
        _sent(strategy, model, batch, inside=True)
        return Traffic(inside=inside, outside=outside, lines=lines)


def _sent(strategy: Strategy, model: torch.nn.Module, batch: tuple[Any, ...], *, inside: bool) -> Sent:
    with strategy.no_backward_sync(model, enabled=inside):
        loss = model(*batch)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            strategy.backward(loss, model)
    events = profile.events()
    # Torch's collectives are ``c10d::all_reduce_``; what each sends is an event such as ``gloo:all_reduce``.
    sent = [shape for event in events if event.name.startswith(("gloo:", "nccl:")) for shape in event.input_shapes]
    return Sent(sum(map(math.prod, sent)), sum(event.name.startswith("c10d::") for event in events))


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect what core logs of ``no_backward_sync``."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: "no_backward_sync" in record.getMessage())
    logger = logging.getLogger("shard_core")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def stepped_inside(subject: Subject) -> dict[str, str]:
    """Clip and step right after a backward inside, then step after one outside; return what each raised."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, _MODEL, plain_descent.make_optimizer)
        batch = models.share_of(strategy, _batches()[0][0])
        with strategy.no_backward_sync(model):
            with strategy.no_backward_sync(model):
                strategy.backward(model(*batch), model)
            strategy.backward(model(*batch), model)
        answers = {}
        for call in (
            functools.partial(strategy.clip_gradients_norm, model, optimizer, 1.0),
            functools.partial(strategy.optimizer_step, optimizer),
        ):
            try:
                call()
                answers[call.func.__name__] = ""
            except SetupError as error:
                answers[call.func.__name__] = str(error)
        strategy.backward(model(*batch), model)
        strategy.optimizer_step(optimizer)
        return answers


def discarded(subject: Subject) -> dict[str, torch.Tensor]:
    """Throw away deferred micro-batches, also after a refusal, and return the gradient of the next step."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, _MODEL, plain_descent.make_optimizer)
        kept, thrown_away = _batches()
        batch = models.share_of(strategy, thrown_away[0])
        with strategy.no_backward_sync(model):
            strategy.backward(model(*batch), model)
        optimizer.zero_grad()
        with contextlib.suppress(ShardError):
            strategy.backward(model(*batch), model)
        optimizer.zero_grad()
        for number, batch in enumerate(kept):
            with strategy.no_backward_sync(model, enabled=number < _MICRO - 1):
                strategy.backward(model(*models.share_of(strategy, batch)) / _MICRO, model)
        return plain_descent.take_step(strategy, model, optimizer)


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
