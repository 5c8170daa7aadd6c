"""Functions of torch's that clip a module's gradients clip as in plain PyTorch, though each rank has parts of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import models, oracle, set_up, whole_weights

_STEPS, _BATCH = 3, 12


class Scaled(nn.Module):
    """Two layers, and a factor without dimensions between them, of which one rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.factor = nn.Parameter(torch.tensor(1.3))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs = self.second(torch.tanh(self.first(inputs)) * self.factor)
        return nn.functional.mse_loss(outputs, targets)


def of_each(model: nn.Module) -> torch.Tensor:
    """Scale each gradient by its own norm, as layer-wise rates do."""
    norms = [parameter.grad.norm() for parameter in model.parameters()]  # type: ignore[union-attr]
    for parameter, norm in zip(model.parameters(), norms, strict=True):
        parameter.grad.div_(1 + norm)  # type: ignore[union-attr]
    return torch.stack(norms)


def by_value(model: nn.Module) -> torch.Tensor:
    nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=True)
    return torch.zeros(())


def by_total(model: nn.Module) -> torch.Tensor:
    """Clip in two parts, as several modules are clipped by one norm."""
    total = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.02, total)
    return total


CLIPS: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    **{
        f"{norm_type}": lambda model, p=norm_type: nn.utils.clip_grad_norm_(model.parameters(), 0.02, p)
        for norm_type in (1.0, 2.0, math.inf)
    },
    "foreach": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.02, foreach=True),
    "each": of_each,
    "value": by_value,
    "total": by_total,
}


def make(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def plain(clip: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, norms = Scaled(), []
    optimizer = make(model.parameters())
    for batch in models.batches("plain", _STEPS, _BATCH):
        optimizer.zero_grad()
        model(*batch).backward()
        norms.append(CLIPS[clip](model))
        optimizer.step()
    return norms, model.state_dict()


def train(stage: int, clips: list[str]) -> dict[str, Any]:
    found = {}
    for clip in clips:
        with get_strategy("deepspeed", stage=stage, **_AWAY.get(stage, {})) as strategy:
            model, optimizer = set_up(strategy, Scaled, lambda module: make(module.parameters()))
            norms = []
            for batch in models.batches("plain", _STEPS, _BATCH):
                optimizer.zero_grad()
                strategy.backward(model(*models.share_of(strategy, batch)), model)
                norms.append(CLIPS[clip](strategy.unwrap(model)))
                strategy.optimizer_step(optimizer)
            found[clip] = norms, whole_weights(strategy, model)
    return found


_AWAY: dict[int, dict[str, Any]] = {3: {"param_persistence_threshold": 0}}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norms_and_clipped_steps_are_those_of_plain_pytorch(worlds: Any, stage: int) -> None:
    for found in worlds(2).run(train, stage, list(CLIPS), timeout=120):
        for clip, (norms, weights) in found.items():
            true_norms, truth = plain(clip)
            torch.testing.assert_close(norms, true_norms, rtol=1e-5, atol=1e-7)
            oracle.assert_same_weights(weights, truth, 1e-5)


def refused(stage: int) -> list[str]:
    messages = []
    with get_strategy("deepspeed", stage=stage) as strategy:
        model, optimizer = set_up(strategy, Scaled, lambda module: make(module.parameters()))
        own: Any = strategy.unwrap(model)
        share = models.share_of(strategy, models.batches("plain", 1, _BATCH)[0])
        strategy.backward(model(*share), model, denominator=2)
        for reads in (
            lambda: nn.utils.clip_grad_norm_(own.parameters(), 1.0),
            lambda: own.first.weight.grad.norm(dim=0),
            lambda: torch.linalg.vector_norm(own.first.weight.grad, 0),
        ):
            with pytest.raises(SetupError) as error:
                reads()
            messages.append(str(error.value))
        kept = own.first.weight.grad
        optimizer.zero_grad()
        strategy.backward(model(*share), model)
        with pytest.raises(SetupError) as error:
            kept.norm()
        messages.append(str(error.value))
    return messages


@pytest.mark.parametrize("stage", [1, 3])
def test_norms_that_would_be_others_are_refused(worlds: Any, stage: int) -> None:
    for messages in worlds(2).run(refused, stage):
        assert "yet to be divided by denominators" in messages[0]
        assert all("strategy.clip_gradients_norm" in message for message in messages)
