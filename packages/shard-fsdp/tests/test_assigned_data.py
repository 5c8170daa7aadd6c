"""``parameter.data = other`` means in a sharded module what it means in any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import oracle


def build() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def swapped(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Exchange the weights for others, as for an evaluation with averages, and return what they were."""
    kept = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data * 0.5
    return kept


def train(model: Any, backward: Any, x: torch.Tensor) -> tuple[list[float], torch.optim.Optimizer]:
    """Train two steps, between which weights are exchanged, looked at and put back, and then halved."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        loss = model(x).square().mean()
        kept = swapped(parameters)
        losses.append(model(x).square().mean().item())
        for parameter, values in zip(parameters, kept, strict=True):
            parameter.data = values
        losses.append(model(x).square().mean().item())
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        swapped(parameters)
    losses.append(model(x).square().mean().item())
    return losses, optimizer


def sharded(precision: str, compiled: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    with get_strategy("fsdp", unit_bytes=1, precision=precision) as strategy:
        model = build()
        if compiled:
            model.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, _ = strategy.setup_module_and_optimizers(model, [optimizer])
        x = torch.linspace(-1, 1, 8).reshape(2, 4).to(next(model.parameters()).dtype)
        losses, _ = train(model, lambda loss: strategy.backward(loss, model), x)
        return losses, strategy.module_state_dict(model)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_assigned_data_counts_and_may_be_put_back(worlds: Any, compiled: bool) -> None:
    plain = build()
    losses, _ = train(plain, torch.Tensor.backward, torch.linspace(-1, 1, 8).reshape(2, 4))
    (first, weights), (second, _) = worlds(2).run(sharded, "32-true", compiled)
    oracle.assert_same_numbers("losses", first, losses, 1e-6)
    oracle.assert_same_numbers("losses", second, losses, 1e-6)
    oracle.assert_same_weights(weights, plain.state_dict(), 1e-6)


def whole() -> tuple[dict[str, torch.Tensor], str]:
    """Assign a whole tensor, which every rank has, and then one of another shape."""
    with get_strategy("fsdp") as strategy:
        model = strategy.setup_module(build())
        first = next(model.parameters())
        first.data = torch.arange(20.0).reshape(5, 4)
        model(torch.ones(1, 4))
        try:
            first.data = torch.ones(2, 4)
        except SetupError as error:
            return strategy.module_state_dict(model), str(error)
        raise AssertionError("data of another shape was taken")


def test_a_whole_tensor_is_spread(worlds: Any) -> None:
    (weights, message), _ = worlds(2).run(whole)
    assert torch.equal(weights["0.weight"], torch.arange(20.0).reshape(5, 4))
    assert message.startswith("a parameter of shape (5, 4) that is spread over ranks was assigned data of shape (2, 4)")
