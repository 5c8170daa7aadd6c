"""A loss through modules that were set up apart is divided in each, though its graph ends at no shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from xla_environments import HASTY

from shard_core import get_strategy
from shard_core.testing import oracle


def make() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 6))


def batch(rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1 + rank, 24).view(4, 6)[: 4 - rank]


def through_two() -> list[tuple[dict[str, torch.Tensor], float]]:
    """Go backward through two modules, the first of which is not named; return the gradients and norm of each."""
    with get_strategy("xla_fsdp", accelerator="xla", auto_wrap_policy={nn.Linear}) as strategy:
        ready = []
        for module in make():
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            ready.append((strategy.setup_module_and_optimizers(module, [optimizer])[0], optimizer))
        (first, _), (second, _) = ready
        inputs = strategy.batch_to_device(batch(strategy.global_rank))
        strategy.backward(second(first(inputs)).square().sum(), second, denominator=inputs.numel())
        gradients = [strategy.module_gradients(module) for module, _ in ready]
        norms = [strategy.clip_gradients_norm(*each, 1e9).item() for each in ready]
        return list(zip(gradients, norms, strict=True))


def test_every_module_a_loss_runs_through_gets_the_gradients_of_plain_pytorch(worlds: Any) -> None:
    truth = make()
    count = sum(batch(rank).numel() for rank in range(2))
    for rank in range(2):
        (truth[1](truth[0](batch(rank))).square().sum() / count).backward()
    found, _ = worlds(2, HASTY).run(through_two)
    for (gradients, norm), module in zip(found, truth, strict=True):
        expected = {key: parameter.grad for key, parameter in module.named_parameters()}
        assert norm == pytest.approx(torch.nn.utils.get_total_norm(expected.values()).item(), rel=1e-5)
        oracle.assert_same_weights(gradients, expected, 1e-5, elementwise=True)
