"""What torch_xla has wrong kernels of, or none for the backward, comes out as in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from xla_stories import FSDP, SPMD, Plain, adamw, sgd

from shard_core import get_strategy
from shard_core.testing import models, oracle

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm1d, nn.InstanceNorm2d)


class Activated(nn.BatchNorm2d):
    """Calls torch's function itself."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        functional, statistics = nn.functional, (self.running_mean, self.running_var)
        return functional.relu(functional.batch_norm(inputs, *statistics, self.weight, self.bias, self.training))


class Units(nn.Module):
    """Has units that are exponential where they are negative, in each of torch's ways, norms and extremes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
        self.own = nn.Parameter(torch.randn(3, 4))
        self.units = [nn.ELU(0.7), nn.CELU(0.3), nn.SELU(), nn.ELU(0.5, inplace=True), nn.SELU(inplace=True)]

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = inputs * 3
        for layer, unit in zip(self.layers, self.units, strict=True):
            found = unit(3 * layer(found))
        norms = [self.own.norm(order) for order in (math.inf, -math.inf, 1, 3, "fro")]  # codespell:ignore fro
        norms += [found.norm(math.inf, dim=1).mean(), torch.norm(self.own, math.inf, dtype=torch.float64).float()]
        norms += [self.own.amax(), self.own.amin(), *self.own.amax(1, keepdim=True)]
        return nn.functional.mse_loss(nn.functional.normalize(found, p=math.inf)[:, :2], targets) + sum(norms)

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)


class Normalizing(nn.Module):
    """Normalizes batches and instances, with and without weights, and the dims of one sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 4, 2)
        self.batches = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False, eps=0.1), Activated(4))
        self.instances = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.lines = nn.InstanceNorm1d(4, track_running_stats=True)
        self.head = nn.Linear(4, 2)
        self.last = nn.BatchNorm1d(2)
        for layer in self.modules():
            if getattr(layer, "running_mean", None) is not None:
                nn.init.normal_(layer.running_mean)
                nn.init.uniform_(layer.running_var, 0.5, 2.0)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = self.instances(self.batches(self.convolution(inputs))).flatten(2)
        lines = torch.stack([self.lines(each) for each in found.unbind()])
        return nn.functional.mse_loss(self.last(self.head(lines.tanh().mean(-1))), targets)

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4, 3, 3, 4, generator=generator), torch.randn(4, 2, generator=generator)


def trained(
    strategy: Any, kind: Any, make: Callable[[Any], optim.Optimizer]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train for three steps, by statistics of before; return norms and losses, and weights."""
    net = kind()
    model, (optimizer,) = strategy.setup_module_and_optimizers(net, [make(net.parameters())])
    generator = torch.Generator().manual_seed(1)
    shown = []
    for layer in net.modules():
        layer.train(not isinstance(layer, NORMS))
    for _ in range(3):
        batch = kind.batch(generator)
        if not isinstance(strategy, Plain):
            batch = models.share_of(strategy, batch)
        loss = model(*batch)
        strategy.backward(loss, model)
        shown.append(float(strategy.clip_gradients_norm(model, optimizer, 1.0)))
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
        shown.append(float(loss.detach() if isinstance(strategy, Plain) else strategy.all_reduce(loss.detach())))
    return shown, strategy.module_state_dict(model)


def trained_sharded(name: str, kind: Any, make: Callable[[Any], optim.Optimizer], classes: Any) -> Any:
    with get_strategy(name, accelerator="xla", **classes) as strategy:
        return trained(strategy, kind, make)


@pytest.mark.parametrize("kind", [Units, Normalizing])
@pytest.mark.parametrize(
    ("strategy", "make", "classes"),
    [
        pytest.param(FSDP, sgd, {}, id="xla_fsdp-sgd"),
        pytest.param(FSDP, adamw, {"auto_wrap_policy": {nn.Linear}}, id="xla_fsdp-adamw-units"),
        pytest.param(FSDP, sgd, {"activation_checkpointing_policy": {nn.Linear}}, id="xla_fsdp-recomputed"),
        pytest.param(SPMD, sgd, {}, id="xla_spmd-sgd"),
    ],
)
def test_training_is_that_of_torchs_kernels(worlds: Any, kind: Any, strategy: Any, make: Any, classes: Any) -> None:
    name, ranks, environment = strategy
    (shown, weights), *_ = worlds(ranks, environment).run(trained_sharded, name, kind, make, classes, timeout=240)
    true_shown, true_weights = trained(Plain(), kind, make)
    oracle.assert_same_numbers("norm or loss", shown, true_shown, 1e-5)
    oracle.assert_same_weights(weights, true_weights, 1e-5)


def in_bfloat16() -> float:
    with get_strategy("xla_fsdp", accelerator="xla", precision="bf16-mixed") as strategy:
        return trained(strategy, Units, sgd)[0][0]


def test_units_train_in_bfloat16(worlds: Any) -> None:
    true_norm = trained(Plain(), Units, sgd)[0][0]
    for norm in worlds(2, FSDP[2]).run(in_bfloat16):
        assert norm == pytest.approx(true_norm, rel=0.1)
