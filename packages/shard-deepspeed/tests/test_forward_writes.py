"""What a forward writes to parameters that stage 3 has gathered for it outlives their being let go of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shard_core import SetupError, get_strategy
from shard_core.testing import models, oracle, set_up, step, whole_weights

_STEPS, _BATCH = 3, 12


class Normalized(nn.Module):
    """Layers whose weights are written to: by a layer itself, by what is around it, and after it has run."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.linspace(-1.0, 1.0, 6))
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.recomputed = recomputed

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.own.clamp_(-0.5, 0.5)
        hidden = checkpoint(self._hidden, inputs, use_reentrant=False) if self.recomputed else self._hidden(inputs)
        outputs = self.second(hidden)
        loss = nn.functional.mse_loss(outputs, targets)
        if not torch.is_grad_enabled():
            self.second.bias.mul_(0.5)  # after the layer has let go of it
        return loss

    def _hidden(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.first.weight.div_(self.first.weight.norm(dim=1, keepdim=True))
        return torch.tanh(self.first(inputs * self.own))


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(module.parameters(), lr=0.02, weight_decay=0.1)


def plain(optimizer: str, recomputed: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Normalized(recomputed)
    made = optimizer_of(optimizer, model)
    for batch in models.batches("plain", _STEPS, _BATCH):
        made.zero_grad()
        model(*batch).backward()
        made.step()
        with torch.no_grad():
            model(*batch)
    return model.state_dict()


def trained(optimizer: str, recomputed: bool, precision: str, threshold: int) -> dict[str, torch.Tensor]:
    with get_strategy("deepspeed_stage_3", precision=precision, param_persistence_threshold=threshold) as strategy:
        made = set_up(strategy, lambda: Normalized(recomputed), lambda module: optimizer_of(optimizer, module))
        for batch in models.batches("plain", _STEPS, _BATCH):
            step(strategy, *made, batch)
            with torch.no_grad():
                made[0](*models.share_of(strategy, batch))
        return whole_weights(strategy, made[0])


@pytest.mark.parametrize("threshold", [0, 4])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_what_a_forward_writes_counts(worlds: Any, optimizer: str, recomputed: bool, threshold: int) -> None:
    expected = plain(optimizer, recomputed)
    for weights in worlds(2).run(trained, optimizer, recomputed, "32-true", threshold):
        oracle.assert_same_weights(weights, expected, 1e-5)


def test_float32_copies_take_it_too(worlds: Any) -> None:
    expected = plain("sgd", False)
    for weights in worlds(2).run(trained, "sgd", False, "bf16-true", 0):
        oracle.assert_same_weights(weights, expected, 3e-2)


class Cached(nn.Module):
    """Layers whose parameters a list holds since they were made, past which stage 3 gathers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.held = [self.first.weight]

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.held[0].mul_(0.5)
        return nn.functional.mse_loss(self.second(self.first(inputs)), targets)


def cached(precision: str) -> str:
    with get_strategy("deepspeed_stage_3", precision=precision, param_persistence_threshold=0) as strategy:
        model, optimizer = set_up(strategy, Cached, lambda module: optimizer_of("sgd", module))
        with pytest.raises(SetupError) as error:
            step(strategy, model, optimizer, models.batches("plain", 1, _BATCH)[0])
        return str(error.value)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_what_was_written_before_it_was_gathered_is_refused(worlds: Any, precision: str) -> None:
    for message in worlds(2).run(cached, precision):
        assert "'first.weight' was written to between forwards" in message


def halved_parts(precision: str, threshold: int) -> list[float]:
    """Halve what the optimizer holds between a backward and its step, run a forward after that; return the weights."""
    options = {"precision": precision, "param_persistence_threshold": threshold}
    with get_strategy("deepspeed_stage_3", accelerator="cpu", **options) as strategy:
        module = nn.Linear(4, 4, bias=False)
        nn.init.ones_(module.weight)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        model, (optimizer,) = strategy.setup_module_and_optimizers(module, [optimizer])
        inputs = torch.ones(2, 4, dtype=torch.bfloat16 if precision == "bf16-true" else torch.float32)
        strategy.backward(model(inputs).mean(), model)
        with torch.no_grad():
            for part in optimizer.param_groups[0]["params"]:
                part.mul_(0.5)
            model(inputs)
        strategy.optimizer_step(optimizer)
        weights = strategy.broadcast(strategy.module_state_dict(model))
        return weights["weight"].flatten().tolist()


@pytest.mark.parametrize("threshold", [0, 1000])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_forward_keeps_what_was_written_to_the_parts(worlds: Any, precision: str, threshold: int) -> None:
    for found in worlds(2).run(halved_parts, precision, threshold):
        assert found == [0.5] * 16
