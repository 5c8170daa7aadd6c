"""A penalty on gradients trains where no layer is split, and is refused where one is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import oracle


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_(True)
    outputs = model(x)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)
    return outputs.mean() + gradient.square().sum(1).mean()


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 48).reshape(8, 6)


def train(options: dict[str, Any]) -> dict[str, torch.Tensor] | str:
    with get_strategy("tp", accelerator="cpu", **options) as strategy:
        model, optimizer = build()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        data = strategy.distributed_sampler_kwargs
        share = batch().tensor_split(data["num_replicas"])[data["rank"]]
        try:
            for _ in range(2):
                strategy.backward(loss_of(model, share), model)
                strategy.optimizer_step(optimizer)
                optimizer.zero_grad()
        except SetupError as error:
            return str(error)
        return {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 1}, {"tensor_parallel_size": 2, "plan": {}}])
def test_penalties_train_through_whole_layers(worlds: Any, options: dict[str, Any]) -> None:
    model, optimizer = build()
    for _ in range(2):
        loss_of(model, batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in worlds(2).run(train, {"plan": {}, **options}):
        oracle.assert_same_weights(weights, model.state_dict(), 1e-5)


def test_penalties_through_split_layers_are_refused(worlds: Any) -> None:
    options = {"tensor_parallel_size": 2, "plan": {"0": "colwise", "2": "rowwise"}}
    for message in worlds(2).run(train, options):
        assert message.startswith("a gradient with create_graph=True comes through '2', which is split"), message
