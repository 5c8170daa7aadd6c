"""After a forward that a ``KeyboardInterrupt`` has ended inside accumulation, the next step averages gradients."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.testing import models, oracle, set_up, whole_weights

_BATCH = 12


class Stopped(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.Linear(5, 3))
        self.stops = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self[0](inputs)
        if self.stops:
            raise KeyboardInterrupt
        return self[1](hidden)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def step_after_a_stop(inside: bool) -> dict[str, torch.Tensor]:
    with get_strategy("ddp") as strategy:
        model, optimizer = set_up(strategy, Stopped, sgd)
        inputs, targets = models.share_of(strategy, models.batches("plain", 1, _BATCH)[0])
        own = strategy.unwrap(model)
        own.stops = True
        outside = contextlib.nullcontext() if inside else contextlib.suppress(KeyboardInterrupt)
        within = contextlib.suppress(KeyboardInterrupt) if inside else contextlib.nullcontext()
        with outside, strategy.no_backward_sync(model), within:
            model(inputs)
        own.stops = False
        strategy.backward(nn.functional.mse_loss(model(inputs), targets), model)
        strategy.optimizer_step(optimizer)
        return whole_weights(strategy, model)


@pytest.mark.parametrize("inside", [False, True])
def test_the_next_step_is_averaged(worlds: Any, inside: bool) -> None:
    torch.manual_seed(0)
    model = Stopped()
    inputs, targets = models.batches("plain", 1, _BATCH)[0]
    optimizer = sgd(model)
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    for weights in worlds(2).run(step_after_a_stop, inside):
        oracle.assert_same_weights(weights, model.state_dict(), 1e-6)
