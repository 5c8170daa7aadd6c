"""What a unit's forward has written counts where an exception ends the forward around it, whatever stays gathered."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from xla_stories import FSDP

from shard_core import get_strategy
from shard_core.testing import models, oracle, set_up, whole_weights

_STEPS, _BATCH = 3, 12


class Writing(nn.Module):
    """A layer that halves its weight before it computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        return torch.tanh(self.layer(inputs))


class Around(nn.Module):
    """Fails, if it is asked to, when the unit inside has run."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = Writing(), nn.Linear(6, 3)
        self.fails = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.inside(inputs)
        if self.fails:
            raise ValueError("out of memory, say")
        return self.head(hidden)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def loop(model: Any, own: Any, backward: Any, step: Any, share: Any) -> None:
    for batch in models.batches("plain", _STEPS, _BATCH):
        inputs, targets = share(batch)
        backward(nn.functional.mse_loss(model(inputs), targets))
        own.fails = True
        with contextlib.suppress(ValueError):
            model(inputs)
        own.fails = False
        step()


def trained(reshard: bool) -> dict[str, torch.Tensor]:
    options = {"auto_wrap_policy": {Writing}, "reshard_after_forward": reshard}
    with get_strategy("xla_fsdp", accelerator="xla", **options) as strategy:
        model, optimizer = set_up(strategy, Around, sgd)

        def step() -> None:
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()

        loop(
            model,
            strategy.unwrap(model),
            lambda loss: strategy.backward(loss, model),
            step,
            lambda batch: models.share_of(strategy, batch),
        )
        return whole_weights(strategy, model)


@pytest.mark.parametrize("reshard", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_a_unit_wrote_before_the_forward_around_it_failed_counts(worlds: Any, reshard: bool) -> None:
    torch.manual_seed(0)
    model = Around()
    optimizer = sgd(model)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    loop(model, model, lambda loss: loss.backward(), step, lambda batch: batch)
    _, ranks, environment = FSDP
    for weights in worlds(ranks, environment).run(trained, reshard):
        oracle.assert_same_weights(weights, model.state_dict(), 1e-5)
