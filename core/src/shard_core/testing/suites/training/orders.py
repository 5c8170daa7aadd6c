"""What plain PyTorch allows between the calls of a step means there what it means anywhere."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from shard_core.capability import Capability
from shard_core.errors import ShardError
from shard_core.testing import models, oracle, plain_descent
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.suites.training.runs import BATCH
from shard_core.testing.training import set_up, whole_weights

if TYPE_CHECKING:
    from shard_core.testing.strategy_under_test import Ranks, Subject

_BOUND = 1e-5
_CLIP = 0.05
"""Far below any norm here."""
_WAYS = tuple(itertools.product((True, False), repeat=2))
"""Whether the module zeroes or its optimizer, and whether to ``None`` or to zeros."""

Gradients = dict[str, torch.Tensor]


class Orders(Suite):
    """What plain PyTorch allows between the calls of a step means there what it means anywhere."""

    @pytest.mark.parametrize("what", ["zeros", "gradients", "weights", "frozen"])
    @promise(after=("micro_batches_add_up", "frozen_parameters_stay_frozen", "changes_by_hand_count"), every_size=False)
    def test_changes_past_a_forward_count(self, ranks: Ranks, what: str) -> None:
        """Between a forward and its backward, too, weights and gradients can be changed, zeroed and frozen by hand.

        A strategy may refuse it instead, before the next step is over, with a ``ShardError`` that says what to do.

        Usual cause:
            While the backward is awaited the module has gathered copies for parameters: what users see and change
            there is not what is trained.
        """
        answers = ranks.run(change_past_a_forward, what)
        if all(isinstance(answer, str) for answer in answers):
            return
        for answer in answers:
            assert not isinstance(answer, str), f"only some ranks refused: {answer}"
            oracle.assert_same_weights(answer, _changed_plainly(what), _BOUND, elementwise=True)

    @promise(after=("micro_batches_add_up", "clips_by_norm"), every_size=False)
    def test_backward_after_clipping_adds_up(self, ranks: Ranks) -> None:
        """A backward after clipping adds its gradients, unclipped, to those that were clipped.

        Usual cause:
            Clipping makes gradients final, so that the next backward is refused or replaces them; or the bound is
            kept for the step, which clips the sum.
        """
        for gradients in ranks.run(clip_between):
            oracle.assert_same_weights(gradients, _clipped_between_plainly(), _BOUND, elementwise=True)

    @promise(needs=Capability.DENOMINATOR, after=("denominator_gives_the_global_mean",), every_size=False)
    def test_zeroed_sums_leave_no_denominator(self, ranks: Ranks) -> None:
        """Gradients that are zeroed take their denominators along, whoever zeroes them, to ``None`` or to zeros.

        Usual cause:
            The denominator is forgotten where gradients are found to be ``None`` alone, or by the optimizer's
            ``zero_grad`` alone; the next step is divided by samples that are not in it.
        """
        for steps in ranks.run(zero_sums):
            for gradients, truth in zip(steps, _gradients_plainly(), strict=True):
                oracle.assert_same_weights(gradients, truth, _BOUND, elementwise=True)

    @pytest.mark.parametrize("how", ["without", "plain", "before", "deferred", "anew"])
    @promise(
        needs=Capability.DENOMINATOR,
        after=("denominator_gives_the_global_mean", "plain_backward_is_right_or_refused"),
        every_size=False,
    )
    def test_denominators_are_of_every_backward(self, ranks: Ranks, how: str) -> None:
        """A step of losses with a denominator and some without, or ``loss.backward()``, is refused on all ranks.

        Where such a loss is the first after gradients were set to ``None`` by hand, it may be right instead.

        Usual cause:
            Nothing notices gradients that come past the strategy's ``backward``, and the step divides them by what
            other losses were sums over.
        """
        for answer in ranks.run(mix_denominators, how):
            if how == "anew" and not isinstance(answer, str):
                oracle.assert_same_weights(answer, _gradients_plainly()[0], _BOUND, elementwise=True)
            else:
                assert isinstance(answer, str), "a mean was added to sums that have denominators, and nobody refused"


def _batches(count: int) -> list[tuple[Any, ...]]:
    return list(models.batches("plain", count, BATCH))


def _pairs() -> list[tuple[Any, ...]]:
    batches = _batches(4)
    return list(zip(batches[::2], batches[1::2], strict=True))


class _Shifted(nn.Module):
    """A regression, and a parameter that no engine keeps for the backward, which would be wrong once it is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.make("plain")
        self.shift = nn.Parameter(torch.linspace(-0.5, 0.5, 6))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(inputs + self.shift, targets)
        return loss


def _change(what: str, model: nn.Module) -> None:
    """Change by hand what plain PyTorch lets be changed while a backward is awaited."""
    if what == "zeros":
        model.zero_grad()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if what == "gradients" and parameter.grad is not None:
                parameter.grad.mul_(0.5)
            elif what == "weights" and name.endswith("shift"):
                parameter.mul_(0.5)
            elif what == "frozen" and "first" in name:
                parameter.requires_grad_(False)


@functools.cache
def _changed_plainly(what: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = _Shifted()
    optimizer = plain_descent.make_optimizer(model)
    for pending, batch in _pairs():
        model(*pending).backward()
        loss = model(*batch)
        _change(what, model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def change_past_a_forward(subject: Subject, what: str) -> dict[str, torch.Tensor] | str:
    """Train with changes between each forward and its backward; return the weights, or the strategy's error."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, _Shifted, plain_descent.make_optimizer)
        try:
            for pending, batch in _pairs():
                strategy.backward(model(*models.share_of(strategy, pending)), model)
                loss = model(*models.share_of(strategy, batch))
                _change(what, model)
                strategy.backward(loss, model)
                strategy.optimizer_step(optimizer)
                optimizer.zero_grad()
        except ShardError as refusal:
            return str(refusal)
        return whole_weights(strategy, model)


@functools.cache
def _clipped_between_plainly() -> Gradients:
    torch.manual_seed(0)
    model = models.make("plain")
    first, second = _batches(2)
    model(*first).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
    model(*second).backward()
    return plain_descent.gradients(model)


def clip_between(subject: Subject) -> Gradients:
    """Clip between two backwards and return the gradient of the step."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, "plain", plain_descent.make_optimizer)
        first, second = _batches(2)
        strategy.backward(model(*models.share_of(strategy, first)), model)
        strategy.clip_gradients_norm(model, optimizer, _CLIP)
        strategy.backward(model(*models.share_of(strategy, second)), model)
        return plain_descent.take_step(strategy, model, optimizer)


@functools.cache
def _gradients_plainly() -> list[Gradients]:
    """Compute the gradients of steps on one batch each."""
    torch.manual_seed(0)
    model = models.make("plain")
    optimizer = plain_descent.make_optimizer(model)
    steps = []
    for batch in _batches(len(_WAYS)):
        model(*batch).backward()
        steps.append(plain_descent.gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return steps


def zero_sums(subject: Subject) -> list[Gradients]:
    """Zero the gradients of a sum in each of the ways, and return the gradient of the step after each."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, "plain", plain_descent.make_optimizer)
        steps = []
        for (by_module, set_to_none), batch in zip(_WAYS, _batches(len(_WAYS)), strict=True):
            inputs, targets = models.share_of(strategy, batch)
            for zero in (True, False):
                strategy.backward(model(inputs, targets, reduction="sum"), model, denominator=targets.numel())
                if zero:
                    (model if by_module else optimizer).zero_grad(set_to_none=set_to_none)
            steps.append(plain_descent.take_step(strategy, model, optimizer))
        return steps


def mix_denominators(subject: Subject, how: str) -> Gradients | str:
    """Take a step on a sum with a denominator and a loss without; return its gradient, or the strategy's error."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, "plain", plain_descent.make_optimizer)
        inputs, targets = models.share_of(strategy, _batches(1)[0])
        try:
            if how == "before":
                model(inputs, targets).backward()
            strategy.backward(model(inputs, targets, reduction="sum"), model, denominator=targets.numel())
            if how == "anew":
                for parameter in model.parameters():
                    parameter.grad = None
            with strategy.no_backward_sync(model, enabled=how == "deferred"):
                loss = model(inputs, targets)
                if how == "without":
                    strategy.backward(loss, model)
                elif how != "before":
                    loss.backward()
            if how == "deferred":
                strategy.backward(model(inputs, targets, reduction="sum"), model, denominator=targets.numel())
            return plain_descent.take_step(strategy, model, optimizer)
        except ShardError as refusal:
            return str(refusal)
