"""A rank whose batch has no samples trains with the others, normalized or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from xla_environments import HASTY

from shard_core import get_strategy
from shard_core.testing import oracle


class Normalizing(nn.Module):
    """Normalizes with a weight and a bias, without a bias, and without either."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.unbiased, self.plain = nn.LayerNorm(4, bias=False), nn.LayerNorm(4, elementwise_affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x)
        return self.norm(found) + 2 * self.unbiased(found) + self.plain(found)


def batch(rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4)[: 3 * (rank == 0)].square()


def gradients(units: set[type[nn.Module]] | None) -> dict[str, torch.Tensor]:
    with get_strategy("xla_fsdp", accelerator="xla", auto_wrap_policy=units) as strategy:
        model = strategy.setup_module(Normalizing())
        inputs = batch(strategy.global_rank)
        loss = model(strategy.batch_to_device(inputs)).exp().sum()
        strategy.backward(loss, model, denominator=inputs.numel())
        return strategy.module_gradients(model)


@pytest.mark.parametrize("units", [None, {nn.LayerNorm}], ids=["one unit", "units"])
def test_gradients_are_those_of_the_ranks_that_have_samples(worlds: Any, units: set[type[nn.Module]] | None) -> None:
    truth = Normalizing()
    (truth(batch(0)).exp().sum() / batch(0).numel()).backward()
    expected = {name: parameter.grad for name, parameter in truth.named_parameters()}
    found, _ = worlds(2, HASTY).run(gradients, units)
    oracle.assert_same_weights(found, expected, 1e-5, elementwise=True)


class NormalizingInstances(nn.Module):
    """Normalizes each sample, with and without weights and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Conv1d(2, 2, 1), nn.InstanceNorm1d(2, affine=True)
        self.tracking = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        self.plain = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x)
        return self.norm(found) + 2 * self.tracking(found) + self.plain(found)


def instances(rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 30).view(3, 2, 5)[: 3 * (rank == 0)].mul(9).sin()


def trained_on_instances(units: set[type[nn.Module]] | None) -> list[dict[str, torch.Tensor]]:
    """Return gradients, and weights and statistics of each rank, in training mode and by statistics."""
    with get_strategy("xla_fsdp", accelerator="xla", auto_wrap_policy=units) as strategy:
        model = strategy.setup_module(NormalizingInstances())
        inputs = instances(strategy.global_rank)
        for mode in (True, False):
            loss = model.train(mode)(strategy.batch_to_device(inputs)).tanh().sum()
            strategy.backward(loss, model, denominator=inputs.numel())
        wrapper = "_fsdp_wrapped_module._fpw_module."
        own = {name.replace(wrapper, ""): each.cpu() for name, each in strategy.unwrap(model).named_buffers()}
        return [strategy.module_gradients(model), own]


@pytest.mark.parametrize("units", [None, {nn.InstanceNorm1d}], ids=["one unit", "units"])
def test_instances_are_normalized_where_there_are_none(worlds: Any, units: set[type[nn.Module]] | None) -> None:
    truth = NormalizingInstances()
    untouched = {name: buffer.clone() for name, buffer in truth.named_buffers()}
    for mode in (True, False):
        (truth.train(mode)(instances(0)).tanh().sum() / (2 * instances(0).numel())).backward()
    expected = {name: parameter.grad for name, parameter in truth.named_parameters()}
    (gradients_found, first), (_, second) = worlds(2, HASTY).run(trained_on_instances, units)
    oracle.assert_same_weights(gradients_found, expected, 1e-4, elementwise=True)
    oracle.assert_same_weights(first, dict(truth.named_buffers()), 1e-5)
    oracle.assert_same_weights(second, untouched, 0.0)
