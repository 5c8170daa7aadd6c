"""Backwards through any of several outputs gather the units that they pass: upstream may miss all but the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from xla_environments import HASTY
from xla_stories import Plain, adamw, sgd

from shard_core import get_strategy
from shard_core.testing import oracle


class OfLayers(nn.Module):
    """Returns what two layers return, one of which may be all that a loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 6))
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 5)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = inputs * self.scale
        return self.left(scaled), self.right(scaled)


class AtOneAddress(nn.Module):
    """Returns a tensor that stands where a layer's output was, which nobody holds any longer, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 6)
        self.left, self.right = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6, 5))
        self.reuses = False

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = self.inside(inputs)
        address = id(inner)
        hidden = torch.tanh(inner)
        first = hidden @ self.left
        second = hidden @ self.right
        if self.reuses:
            del inner
            tried = []
            while id(second) != address and len(tried) < 100_000:
                tried.append(second)
                second = second.view(-1, 5)
            assert id(second) == address, "the address was never taken again"
        return first, second


def train(strategy: Any, net: Any, make: Callable[[Any], optim.Optimizer]) -> tuple[list[float], dict[str, Any]]:
    """Train on the second output, on both, and on the second again; return norms, and weights and optimizer state."""
    torch.manual_seed(0)
    batches = torch.randn(3, 4, 6)
    if not isinstance(strategy, Plain):
        batches = strategy.batch_to_device(batches[:, strategy.global_rank :: strategy.world_size])
        net.reuses = strategy.global_rank == 1
    torch.manual_seed(1)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    model, (optimizer,) = strategy.setup_module_and_optimizers(net, [make(net.parameters())])
    norms = []
    for batch, used in zip(batches, ((1,), (0, 1), (1,)), strict=True):
        outputs = model(batch)
        strategy.backward(sum(outputs[each].square().mean() for each in used), model)
        norms.append(float(strategy.clip_gradients_norm(model, optimizer, 0.5)))
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
    plain = isinstance(strategy, Plain)
    slots_of = optimizer.state_dict()["state"] if plain else strategy.optimizer_state_dict(optimizer).get("state", {})
    names = [name for name, _ in net.named_parameters()]
    state = {
        f"{names[key] if plain else key} {slot}": torch.as_tensor(value)
        for key, slots in slots_of.items()
        for slot, value in slots.items()
    }
    return norms, strategy.module_state_dict(model) | state


def train_sharded(kind: type[nn.Module], make: Callable[[Any], optim.Optimizer]) -> tuple[list[float], dict[str, Any]]:
    with get_strategy("xla_fsdp", accelerator="xla", auto_wrap_policy={nn.Linear}) as strategy:
        return train(strategy, kind(), make)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("kind", [OfLayers, AtOneAddress])
def test_any_output_may_be_all_that_a_loss_uses(
    worlds: Any, kind: type[nn.Module], make: Callable[[Any], optim.Optimizer]
) -> None:
    (norms, weights), *_ = worlds(2, HASTY).run(train_sharded, kind, make)
    true_norms, true_weights = train(Plain(), kind(), make)
    oracle.assert_same_numbers("norm", norms, true_norms, 1e-5)
    oracle.assert_same_weights(weights, true_weights, 1e-5)
