"""Training gives what plain PyTorch gives in one process."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from shard_core.testing import models, oracle
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.training import set_up, step, whole_weights

if TYPE_CHECKING:
    from shard_core.testing.subject import Ranks, Subject

_BATCH = 12


class Parity(Suite):
    """Losses, gradient norms and weights of plain PyTorch in one process."""

    @promise()
    def test_averages_gradients(self, ranks: Ranks) -> None:
        """A step's gradient is the mean over all data-parallel ranks.

        Usual cause:
            Gradients are summed, averaged twice or left on their rank; AdamW hides it, SGD does not.
        """
        truth = _one_step_of_sgd()
        for weights in ranks.run(one_step_of_sgd):
            oracle.assert_same_weights(weights, truth, 1e-6, elementwise=True)


@functools.cache
def _one_step_of_sgd() -> dict[str, torch.Tensor]:
    return oracle.train(
        lambda: models.make("plain"),
        lambda module: torch.optim.SGD(module.parameters(), lr=0.5),
        models.batches("plain", 1, _BATCH),
    ).weights


def one_step_of_sgd(subject: Subject) -> dict[str, torch.Tensor]:
    """Take one step on this rank's share and return the whole weights."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, "plain", lambda module: torch.optim.SGD(module.parameters(), lr=0.5))
        (batch,) = models.batches("plain", 1, _BATCH)
        step(strategy, model, optimizer, batch)
        return whole_weights(strategy, model)
