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


def train_compiled(how: str, stopped: bool) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    with get_strategy("single", accelerator="cpu", precision="bf16-mixed") as strategy:
        own = Stopped()
        if how == "in place":
            own.compile(backend="aot_eager")
        model, (optimizer,) = strategy.setup_module_and_optimizers(own, [sgd(own)])
        called = torch.compile(model, backend="aot_eager") if how == "around" else model
        inputs, _ = models.batches("plain", 1, _BATCH)[0]
        own.stops = stopped
        with contextlib.suppress(KeyboardInterrupt), torch.no_grad():
            called(inputs)
        own.stops = False
        losses = []
        for _ in range(3):
            loss = called(inputs).float().square().mean()
            strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(loss.detach())
        return strategy.module_state_dict(model), losses


@pytest.mark.parametrize("how", ["plain", "in place", "around"])
def test_autocast_keeps_no_weights_after_a_stop(how: str) -> None:
    weights, losses = train_compiled(how, stopped=False)
    found, after = train_compiled(how, stopped=True)
    assert torch.equal(torch.stack(after), torch.stack(losses))
    oracle.assert_same_weights(found, weights, 0.0, elementwise=True)
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()
