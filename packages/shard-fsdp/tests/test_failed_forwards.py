"""What a forward had gathered that an exception ended is not what a forward after the next step computes with."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.testing import models, oracle, set_up, whole_weights

_STEPS, _BATCH = 3, 12
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("fsdp", {}),
    ("fsdp", {"reshard_after_forward": False}),
    ("fsdp", {"unit_bytes": 1}),
    ("hsdp", {"unit_bytes": 1}),
]


class Failing(nn.Module):
    """Layers with an exception between them, if it is asked for, and a write before that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.fails = self.writes = False

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        if self.writes:
            with torch.no_grad():
                self.second.bias.mul_(0.5)
        outputs = self.second(hidden)
        if self.fails:
            raise ValueError("out of memory, say")
        return nn.functional.mse_loss(outputs, targets)


def fail(model: Any, batch: Any, grad: bool) -> None:
    inside = getattr(model, "module", model)
    inside.fails = True
    with pytest.raises(ValueError, match="out of memory"), torch.set_grad_enabled(grad):
        model(*batch)
    inside.fails = False


def loop(model: Any, backward: Any, step: Any, share: Any, grad: bool, kept: bool, deferred: Any) -> None:
    """Train; forwards fail after each backward, inside accumulation too, or between a forward and its backward."""
    for batch in models.batches("plain", _STEPS, _BATCH):
        with deferred():
            backward(model(*share(batch)))
            fail(model, share(batch), grad)
        loss = model(*share(batch))
        if kept:
            fail(model, share(batch), grad)
        backward(loss)
        fail(model, share(batch), grad)
        step()


def plain(grad: bool, kept: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Failing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    loop(model, lambda loss: loss.backward(), step, lambda batch: batch, grad, kept, contextlib.nullcontext)
    return model.state_dict()


def trained(
    name: str, options: dict[str, Any], grad: bool, kept: bool, compiled: bool = False
) -> dict[str, torch.Tensor]:
    with get_strategy(name, **options) as strategy:
        model, optimizer = set_up(
            strategy, Failing, lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        )

        if compiled:
            model.compile(backend="aot_eager")

        def step() -> None:
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()

        loop(
            model,
            lambda loss: strategy.backward(loss, model),
            step,
            lambda batch: models.share_of(strategy, batch),
            grad,
            kept,
            lambda: strategy.no_backward_sync(model),
        )
        return whole_weights(strategy, model)


@pytest.mark.parametrize(("name", "options"), LAYOUTS)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_steps_after_a_failed_forward_count(
    worlds: Any, name: str, options: dict[str, Any], grad: bool, kept: bool
) -> None:
    expected = plain(grad, kept)
    for weights in worlds(2).run(trained, name, options, grad, kept):
        oracle.assert_same_weights(weights, expected, 1e-5)


@pytest.mark.parametrize("grad", [False, True])
def test_steps_after_a_failed_forward_of_what_was_compiled_count(worlds: Any, grad: bool) -> None:
    for weights in worlds(2).run(trained, "fsdp", {}, grad, False, True):
        oracle.assert_same_weights(weights, plain(grad, False), 1e-5)


def written(name: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    with get_strategy(name, **options) as strategy:
        model, _ = set_up(strategy, Failing, lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
        strategy.unwrap(model).writes = True
        fail(strategy.unwrap(model), models.share_of(strategy, models.batches("plain", 1, _BATCH)[0]), True)
        return whole_weights(strategy, model)


@pytest.mark.parametrize(("name", "options"), LAYOUTS[:2])
def test_what_it_wrote_before_counts(worlds: Any, name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Failing()
    with torch.no_grad():
        model.second.bias.mul_(0.5)
    for weights in worlds(2).run(written, name, options):
        oracle.assert_same_weights(weights, model.state_dict(), 0.0)
