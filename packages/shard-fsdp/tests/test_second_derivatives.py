"""Losses that hold gradients: penalties in all the orders in which they are computed, and forces inside forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.testing import oracle

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "root": ("fsdp", {}),
    "units": ("fsdp", {"unit_bytes": 1}),
    "kept": ("fsdp", {"unit_bytes": 1, "reshard_after_forward": False}),
    "copies": ("hsdp", {"data_parallel_size": 2}),
    "offloaded": ("fsdp_cpu_offload", {"unit_bytes": 1}),
}


class Critic(nn.Module):
    """Blocks without a curvature of their own, so that the graph of a gradient leads past what they return."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 1)
        self.activation = activation
        self.with_forces = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.with_forces:
            return self.energy(x)
        with torch.enable_grad():
            x = x.clone().requires_grad_(True)
            energy = self.energy(x)
            (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
            return energy.square().mean() + forces.square().sum(1).mean()

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.activation(block(x))
        return self.head(x)


def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def first(model: Any, x: torch.Tensor, backward: Callable[[torch.Tensor], None]) -> None:
    gradient = penalty(model, x)
    backward(model(x + 1).mean() - model(x).mean() + gradient)


def last(model: Any, x: torch.Tensor, backward: Callable[[torch.Tensor], None]) -> None:
    loss = model(x + 1).mean() - model(x).mean()
    backward(loss + penalty(model, x))


def apart(model: Any, x: torch.Tensor, backward: Callable[[torch.Tensor], None]) -> None:
    backward(model(x + 1).mean())
    backward(penalty(model, x))
    backward(-model(x).mean())


def twice(model: Any, x: torch.Tensor, backward: Callable[[torch.Tensor], None]) -> None:
    """Go through the graph of a gradient by the gradient of that, through one forward."""
    x = x.clone().requires_grad_(True)
    outputs = model(x)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)
    (product,) = torch.autograd.grad((gradient * gradient.detach()).sum(), x, create_graph=True)
    backward(product.square().sum(1).mean() + outputs.square().mean())


def unused(model: Any, x: torch.Tensor, backward: Callable[[torch.Tensor], None]) -> None:
    penalty(model, x)
    backward(model(x).square().mean())


def forces(model: Any, x: torch.Tensor, backward: Callable[[torch.Tensor], None]) -> None:
    model.with_forces = True
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    backward(model(x))


ORDERS = {each.__name__: each for each in (first, last, apart, twice, unused, forces)}
ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh}


def build(activation: str) -> tuple[Critic, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Critic(ACTIVATIONS[activation])
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches() -> list[torch.Tensor]:
    return [torch.linspace(-1, number, 48).reshape(8, 6).sin() for number in range(1, 4)]


def train(layout: str, order: str, activation: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    name, options = LAYOUTS[layout]
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        model, optimizer = build(activation)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        norms = []
        for x in batches():
            share = x.tensor_split(2)[strategy.global_rank]
            ORDERS[order](model, share, lambda loss: strategy.backward(loss, model))
            norms.append(float(strategy.clip_gradients_norm(model, optimizer, 1e9)))
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return norms, {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


def plainly(order: str, activation: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer = build(activation)
    norms = []
    for x in batches():
        for share in x.tensor_split(2):
            ORDERS[order](model, share, lambda loss: (loss / 2).backward())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


@pytest.mark.parametrize("activation", [pytest.param("relu", marks=pytest.mark.long), "tanh"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_that_hold_gradients_train(worlds: Any, layout: str, order: str, activation: str) -> None:
    norms, weights = plainly(order, activation)
    for mine, trained in worlds(2).run(train, layout, order, activation):
        assert mine == pytest.approx(norms, rel=1e-5)
        oracle.assert_same_weights(trained, weights, 1e-5)
