"""Norms are those of the whole gradient, and clipping works as plain PyTorch's."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shard_core.capability import Capability
from shard_core.errors import NonFiniteGradient
from shard_core.testing import models, oracle, plain_descent
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.training import set_up

if TYPE_CHECKING:
    from shard_core.testing.strategy_under_test import Ranks, Subject

_BATCH = 12
_CLIP = 0.02
_BITES, _LEAVES = 0.05, 1000.0
_BOUND = 1e-4
"""Clipped gradients are small beside the weights whose rounding they are read through."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipped:
    """What clipping returned, and the gradients that were stepped with afterwards.

    Attributes:
        norm: The norm.
        layout: Its type and shape.
        gradients: By name, whole.
    """

    norm: float
    layout: tuple[str, tuple[int, ...]]
    gradients: dict[str, torch.Tensor]


class Clipping(Suite):
    """Norms are those of the whole gradient, and clipping works as plain PyTorch's."""

    # Shards of uneven sizes; a parameter without a dimension, which engines keep whole; tied weights.
    @pytest.mark.parametrize("model", ["uneven", "scalar", "gpt"])
    @promise(after=("averages_gradients", "ties_stay_tied"))
    def test_norm_is_global_and_alike(self, ranks: Ranks, model: str) -> None:
        """The norm is that of the whole gradient, every parameter counted once, a 0-d tensor alike on all ranks.

        Usual cause:
            Each rank takes the norm of its own shards, what all ranks hold is counted once for each of them, or
            the norm is returned as a distributed tensor that is not reduced yet.
        """
        (truth,) = _in_plain_pytorch(model, (math.inf,), 2.0)
        answers = [answer for (answer,) in ranks.run(clipped_by_norm, model, (math.inf,), 2.0)]
        oracle.assert_same_numbers("gradient norm", [answers[0].norm], [truth.norm], 2e-6)
        norms = [answer.norm for answer in answers]
        assert len(set(norms)) == 1, f"the ranks' norms differ: {norms}"
        for answer in answers:
            assert answer.layout == truth.layout, f"the norm is {answer.layout}, it must be {truth.layout}"

    @promise(after=("averages_gradients", "norm_is_global_and_alike"))
    def test_clips_by_norm(self, ranks: Ranks) -> None:
        """A gradient above the bound is scaled down to it, one below is left alone; the norm is that of before.

        Usual cause:
            Gradients are scaled by a local norm, on some ranks only or not at all, or small ones are scaled up.
        """
        _assert_clipped(ranks, (_BITES, _LEAVES), 2.0)

    @pytest.mark.parametrize("norm_type", [1.0, math.inf], ids=["1", "inf"])
    @promise(needs=Capability.CLIP_ANY_NORM, after=("averages_gradients", "norm_is_global_and_alike", "clips_by_norm"))
    def test_clips_by_other_norms(self, ranks: Ranks, norm_type: float) -> None:
        """Clipping works by the sum of absolute values and by the largest of them as well.

        Usual cause:
            Norms of shards are combined as if they were 2-norms, or ``norm_type`` is ignored.
        """
        _assert_clipped(ranks, (_BITES,), norm_type)

    @promise(needs=Capability.CLIP_VALUE, after=("averages_gradients", "norm_is_global_and_alike"))
    def test_clips_by_value(self, ranks: Ranks) -> None:
        """Every element of the averaged gradient is clamped between the bound and its negative.

        Usual cause:
            Gradients are clamped before they are averaged, from one side only, or not at all.
        """
        truth = _clamped_in_plain_pytorch()
        for gradients in ranks.run(clipped_by_value):
            oracle.assert_same_weights(gradients, truth, _BOUND, elementwise=True)

    @pytest.mark.parametrize("spoil", [math.inf, math.nan], ids=["inf", "nan"])
    @promise(after=("averages_gradients", "norm_is_global_and_alike"))
    def test_non_finite_norm_raises_everywhere(self, ranks: Ranks, spoil: float) -> None:
        """One rank's infinity or NaN makes clipping raise on every rank, or return it to whoever asks for that.

        Usual cause:
            Each rank looks at its own shards only: one raises and the others wait for it, or step without it.
        """
        for rank, (raised, norm) in enumerate(ranks.run(clipped_spoiled, spoil)):
            assert raised, f"rank {rank} did not raise NonFiniteGradient"
            assert not math.isfinite(norm), f"rank {rank} returned the norm {norm} with error_if_nonfinite=False"


def _assert_clipped(ranks: Ranks, max_norms: tuple[float, ...], norm_type: float) -> None:
    truth = _in_plain_pytorch("uneven", max_norms, norm_type)
    for answers in ranks.run(clipped_by_norm, "uneven", max_norms, norm_type):
        norms = [answer.norm for answer in answers]
        oracle.assert_same_numbers("gradient norm before clipping", norms, [each.norm for each in truth], _BOUND)
        for answer, expected in zip(answers, truth, strict=True):
            oracle.assert_same_weights(answer.gradients, expected.gradients, _BOUND, elementwise=True)


def _batch(name: str) -> tuple[Any, ...]:
    return models.batches(name, 1, _BATCH)[0]


@functools.cache
def _in_plain_pytorch(name: str, max_norms: tuple[float, ...], norm_type: float) -> list[Clipped]:
    """Take a step with each of the bounds."""
    torch.manual_seed(0)
    model = models.make(name)
    optimizer = plain_descent.make_optimizer(model)
    steps = []
    for max_norm in max_norms:
        model(*_batch(name)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        steps.append(_clipped(norm, plain_descent.gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    return steps


@functools.cache
def _clamped_in_plain_pytorch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = models.make("uneven")
    model(*_batch("uneven")).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), _CLIP)
    return plain_descent.gradients(model)


def _clipped(norm: torch.Tensor, gradients: dict[str, Any]) -> Clipped:
    return Clipped(norm=float(norm), layout=(type(norm).__name__, tuple(norm.shape)), gradients=gradients)


def clipped_by_norm(subject: Subject, name: str, max_norms: tuple[float, ...], norm_type: float) -> list[Clipped]:
    """Take a step with each of the bounds on the gradient's norm."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, name, plain_descent.make_optimizer)
        steps = []
        for max_norm in max_norms:
            strategy.backward(model(*models.share_of(strategy, _batch(name))), model)
            norm = strategy.clip_gradients_norm(model, optimizer, max_norm, norm_type)
            steps.append(_clipped(norm, plain_descent.take_step(strategy, model, optimizer)))
        return steps


def clipped_by_value(subject: Subject) -> dict[str, torch.Tensor]:
    """Clip one gradient by value and step with it."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, "uneven", plain_descent.make_optimizer)
        strategy.backward(model(*models.share_of(strategy, _batch("uneven"))), model)
        strategy.clip_gradients_value(model, optimizer, _CLIP)
        return plain_descent.take_step(strategy, model, optimizer)


def clipped_spoiled(subject: Subject, spoil: float) -> tuple[bool, float]:
    """Clip a gradient that one rank spoiled; return whether that raised, and the norm without raising."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, plain_descent.Fragile, plain_descent.make_optimizer)
        strategy.backward(plain_descent.spoiled_loss(strategy, model, _batch("plain"), spoil), model)
        raised = False
        try:
            strategy.clip_gradients_norm(model, optimizer, 1.0)
        except NonFiniteGradient:
            raised = True
        return raised, float(strategy.clip_gradients_norm(model, optimizer, 1.0, error_if_nonfinite=False))
