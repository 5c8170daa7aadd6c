"""Penalties computed from sharded parameters, on layers that have fewer rows than there are ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.testing import oracle

ORDERS = {
    "after the loss": ("loss", "penalty"),
    "before the loss": ("penalty", "loss"),
    "twice": ("penalty", "penalty"),
    "between two losses": ("loss", "penalty", "loss"),
    "of the gathered, after the loss": ("loss", "gathered"),
}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(rank: int) -> torch.Tensor:
    return torch.linspace(-1 - rank, 1, 12).reshape(3, 4)


def train(name: str, order: tuple[str, ...]) -> Any:
    with get_strategy(name, accelerator="cpu") as strategy:
        module = make()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        model, (stepped,) = strategy.setup_module_and_optimizers(module, [optimizer])
        for kind in order:
            if kind == "loss":
                strategy.backward(model(batch(strategy.distributed_sampler_kwargs["rank"])).square().mean(), model)
            for parameter in () if kind == "loss" else model.parameters():
                whole = parameter.full_tensor() if kind == "gathered" else parameter
                strategy.backward(0.01 * whole.square().sum(), model)
        gradients = strategy.module_gradients(model)
        norm = strategy.clip_gradients_norm(model, stepped, 0.1).item()
        strategy.optimizer_step(stepped)
        return gradients, norm, strategy.module_state_dict(model)


@pytest.mark.parametrize("name", ["fsdp", "fsdp_cpu_offload", "hsdp"])
@pytest.mark.parametrize("order", ORDERS)
def test_penalties_add_to_gradients_as_in_plain_pytorch(worlds: Any, name: str, order: str) -> None:
    truth = make()
    optimizer = torch.optim.SGD(truth.parameters(), lr=0.1, momentum=0.9)
    for kind in ORDERS[order]:
        for rank in range(2) if kind == "loss" else ():
            (truth(batch(rank)).square().mean() / 2).backward()
        for parameter in () if kind == "loss" else truth.parameters():
            (0.01 * parameter.square().sum()).backward()
    gradients = {key: parameter.grad.clone() for key, parameter in truth.named_parameters()}
    norm = torch.nn.utils.clip_grad_norm_(truth.parameters(), 0.1).item()
    optimizer.step()
    for rank, (found, measured, weights) in enumerate(worlds(2).run(train, name, ORDERS[order])):
        assert measured == pytest.approx(norm, rel=1e-5)
        oracle.assert_same_weights(found, {} if rank else gradients, 1e-5, elementwise=True)
        oracle.assert_same_weights(weights, {} if rank else truth.state_dict(), 1e-5, elementwise=True)
