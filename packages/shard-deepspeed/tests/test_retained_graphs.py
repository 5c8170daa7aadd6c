"""Two backwards through one graph, whose parameters stage 3 gathers again for the second."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shard_core import get_strategy
from shard_core.testing import models, oracle, whole_weights

_STEPS, _BATCH = 4, 12
_OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1),
}


class Branched(nn.Module):
    """Saves for backward parameters themselves and views of them; one layer is called twice, one computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm, self.convolution = nn.LayerNorm(8), nn.Conv1d(1, 1, 3, padding=1)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(torch.tanh(self.first(inputs)) * self.scale)
        hidden = hidden + self.convolution(hidden[:, None]).squeeze(1)
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(hidden))))
        hidden = hidden + checkpoint(self.twice, hidden, use_reentrant=False)
        return self.last(hidden), hidden.square().mean()


class Plain:
    """One process, and torch's own backward."""

    def backward(self, loss: torch.Tensor, model: nn.Module, **kwargs: Any) -> None:
        loss.backward(**kwargs)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()


def train(strategy: Any, model: Any, optimizer: Any, share: Any) -> None:
    """Take two losses of one forward, one of them twice, with other forwards between the backwards."""
    for number, batch in enumerate(models.batches("plain", _STEPS, _BATCH)):
        inputs, targets = share(batch)
        outputs, penalty = model(inputs)
        loss = nn.functional.mse_loss(outputs, targets)
        strategy.backward(loss, model, retain_graph=True)
        if number % 2:
            with torch.no_grad():
                model(inputs)
            strategy.backward(model(inputs + 1.0)[1], model)
        strategy.backward(loss * 0.5, model, retain_graph=True)
        strategy.backward(penalty, model, retain_graph=number == 2)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()


def retain(kind: str, threshold: int) -> dict[str, torch.Tensor]:
    with get_strategy("deepspeed_stage_3", param_persistence_threshold=threshold) as strategy:
        torch.manual_seed(0)
        module = Branched()
        model, (optimizer,) = strategy.setup_module_and_optimizers(module, [_OPTIMIZERS[kind](module.parameters())])
        train(strategy, model, optimizer, lambda batch: models.share_of(strategy, batch))
        return whole_weights(strategy, model)


@pytest.mark.parametrize("kind", _OPTIMIZERS)
@pytest.mark.parametrize("threshold", [0, 100_000])
def test_a_graph_is_gone_through_again(worlds: Any, kind: str, threshold: int) -> None:
    torch.manual_seed(0)
    plain = Branched()
    train(Plain(), plain, _OPTIMIZERS[kind](plain.parameters()), lambda batch: batch)
    for weights in worlds(2).run(retain, kind, threshold):
        oracle.assert_same_weights(weights, plain.state_dict(), 1e-5)
