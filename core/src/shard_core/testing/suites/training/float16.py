"""In float16 with a gradient scaler, ranks agree on overflows, and nobody sees the scaler's factor."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from shard_core.capability import Capability
from shard_core.testing import models, oracle, plain_descent
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.training import set_up, whole_weights

if TYPE_CHECKING:
    from shard_core.testing.strategy_under_test import Ranks, Subject

_BATCH = 96
"""Large enough that on up to eight ranks no gradient overflows float16 under the scaler's first factor."""
_STEPS = 4
_SPOILED_STEP = 1
_TRIES = 20
_LARGE = 1e35
"""A gradient that float32 holds, and also times 2048, but not times the factors scalers begin with."""
_CLIP = 0.1
_BOUND = 1e-2


class Float16(Suite):
    """In float16 with a gradient scaler, ranks agree on overflows, and nobody sees the scaler's factor."""

    @promise(needs=Capability.FP16, after=("averages_gradients", "norm_is_global_and_alike", "clips_by_norm"))
    def test_norms_are_unscaled(self, ranks: Ranks) -> None:
        """In ``16-mixed`` norms and bounds are those of the gradient without the scaler's factor.

        Usual cause:
            The gradient is clipped before the factor is taken out of it, or the factor is taken out twice.
        """
        truth = oracle.train(
            plain_descent.Fragile,
            plain_descent.make_optimizer,
            models.batches("plain", _STEPS, _BATCH),
            clip=_CLIP,
            autocast_dtype=torch.float16,
        )
        assert max(truth.norms) > _CLIP, "clipping must have something to do"
        for norms, weights in ranks.run(clipped_in_float16):
            oracle.assert_same_numbers("gradient norm", norms, truth.norms, _BOUND)
            oracle.assert_same_weights(weights, truth.weights, _BOUND)

    @promise(needs=Capability.FP16, after=("averages_gradients", "step_says_whether_it_stepped"))
    def test_overflow_skips_the_step_everywhere(self, ranks: Ranks) -> None:
        """In ``16-mixed`` one rank's infinite gradient makes every rank skip the step, and all scale alike after.

        Usual cause:
            Each rank looks for infinities in its own gradients only, so that ranks step apart or scale apart.
        """
        expected = [step != _SPOILED_STEP for step in range(_STEPS)]
        truth = _without_spoiled_step()
        stories = ranks.run(overflowing)
        for rank, (stepped, norm, changed, _, weights) in enumerate(stories):
            assert stepped == expected, f"on rank {rank} optimizer_step returned {stepped}, it must be {expected}"
            assert not math.isfinite(norm), f"on rank {rank} clipping returned the norm {norm} of an infinite gradient"
            assert changed == expected, f"on rank {rank} weights changed in the steps {changed}, it must be {expected}"
            oracle.assert_same_weights(weights, truth, _BOUND)
        scalers = [scaler for *_, scaler, _ in stories]
        assert all(scaler == scalers[0] for scaler in scalers), f"the ranks' scalers differ: {scalers}"

    @promise(needs=Capability.FP16, after=("overflow_skips_the_step_everywhere",))
    def test_factor_falls_until_it_fits(self, ranks: Ranks) -> None:
        """In ``16-mixed`` every skipped step lowers the scaler's factor, until a step succeeds on all ranks at once.

        Usual cause:
            The scaler never learns that a step was skipped, or its factor is read once and kept.
        """
        tries = ranks.run(tries_until_it_fits)
        assert tries[0] is not None, f"{_TRIES} steps in a row were skipped though a factor of 2048 would do"
        assert tries[0] > 1, "a gradient that is too large for the scaler's first factor was stepped with"
        assert len(set(tries)) == 1, f"the ranks first stepped after {tries} tries"


@functools.cache
def _without_spoiled_step() -> dict[str, torch.Tensor]:
    batches = models.batches("plain", _STEPS, _BATCH)
    return oracle.train(
        plain_descent.Fragile,
        plain_descent.make_optimizer,
        [batch for step, batch in enumerate(batches) if step != _SPOILED_STEP],
        autocast_dtype=torch.float16,
    ).weights


def clipped_in_float16(subject: Subject) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a few clipped steps; return the norms and the weights."""
    with subject.strategy(precision="16-mixed") as strategy:
        model, optimizer = set_up(strategy, plain_descent.Fragile, plain_descent.make_optimizer)
        norms = []
        for batch in models.batches("plain", _STEPS, _BATCH):
            strategy.backward(model(*models.share_of(strategy, batch)), model)
            norms.append(float(strategy.clip_gradients_norm(model, optimizer, _CLIP)))
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return norms, whole_weights(strategy, model)


def overflowing(subject: Subject) -> tuple[list[Any], float, list[bool], Any, dict[str, torch.Tensor]]:
    """Train a few steps, one rank's gradient infinite in one of them.

    Returns:
        What the steps returned, the norm of the infinite gradient, in which steps weights changed, the scaler's
        state at the end, and the weights.
    """
    with subject.strategy(precision="16-mixed") as strategy:
        model, optimizer = set_up(strategy, plain_descent.Fragile, plain_descent.make_optimizer)
        weights = whole_weights(strategy, model)
        stepped, changed, norm = [], [], 0.0
        for step, batch in enumerate(models.batches("plain", _STEPS, _BATCH)):
            spoil = math.inf if step == _SPOILED_STEP else 0.0
            strategy.backward(plain_descent.spoiled_loss(strategy, model, batch, spoil), model)
            if step == _SPOILED_STEP:
                norm = float(strategy.clip_gradients_norm(model, optimizer, 1.0))
            stepped.append(strategy.optimizer_step(optimizer))
            optimizer.zero_grad()
            before, weights = weights, whole_weights(strategy, model)
            changed.append(any(not torch.equal(before[name], weight) for name, weight in weights.items()))
        return stepped, norm, changed, strategy.precision.state_dict(), weights


def tries_until_it_fits(subject: Subject) -> int | None:
    """Repeat a step whose gradient is infinite under a large factor; count until one is not skipped."""
    with subject.strategy(precision="16-mixed") as strategy:
        model, optimizer = set_up(strategy, plain_descent.Fragile, plain_descent.make_optimizer)
        (batch,) = models.batches("plain", 1, _BATCH)
        for number in range(1, _TRIES + 1):
            strategy.backward(plain_descent.spoiled_loss(strategy, model, batch, _LARGE), model)
            if strategy.optimizer_step(optimizer):
                return number
            optimizer.zero_grad()
        return None
