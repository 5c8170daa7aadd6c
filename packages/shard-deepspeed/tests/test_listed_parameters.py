"""A forward that lists parameters of layers that are away: stage 3 gathers them, or a penalty would be zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.testing import models, oracle, whole_weights

_STEPS, _BATCH = 8, 12
_OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1),
}


class Penalized(nn.Module):
    """Adds up weights of its layers, frozen ones too, by each of the ways to list them.

    Args:
        late: Whether not in the first forwards: then DeepSpeed has learnt the order of layers and gathers ahead.
    """

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.wait = _STEPS // 2 if late else 0
        self.first, self.frozen, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.frozen.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.frozen(torch.tanh(self.first(inputs))))
        self.wait -= 1
        if self.wait >= 0:
            return self.last(hidden), torch.zeros(())
        listed = [*self.parameters(), *self.frozen.parameters(recurse=False)]
        named = [weight for name, weight in self.named_parameters(prefix="its") if name.startswith("its.last.w")]
        return self.last(hidden), sum((each.square().sum() for each in [*listed, *named]), torch.zeros(()))


def train(backward: Any, step: Any, model: Any, optimizer: Any, share: Any, evaluated: bool) -> list[float]:
    """Return penalties of training forwards, and of evaluations before each."""
    penalties = []
    for batch in models.batches("plain", _STEPS, _BATCH):
        inputs, targets = share(batch)
        if evaluated:
            with torch.no_grad():
                penalties.append(model.eval()(inputs)[1].item())
        outputs, penalty = model.train()(inputs)
        penalties.append(penalty.item())
        backward(nn.functional.mse_loss(outputs, targets) + 0.01 * penalty)
        step(optimizer)
        optimizer.zero_grad()
    return penalties


def listed(kind: str, late: bool) -> tuple[list[float], dict[str, torch.Tensor], list[torch.Size]]:
    with get_strategy("deepspeed_stage_3", param_persistence_threshold=0) as strategy:
        torch.manual_seed(0)
        module = Penalized(late)
        model, [optimizer] = strategy.setup_module_and_optimizers(module, [_OPTIMIZERS[kind](module.parameters())])
        penalties = train(
            lambda loss: strategy.backward(loss, model),
            strategy.optimizer_step,
            model,
            optimizer,
            lambda batch: models.share_of(strategy, batch),
            evaluated=not late,
        )
        outside = [each.shape for each in model.parameters()]
        return penalties, whole_weights(strategy, model), outside


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_penalties_over_what_a_forward_lists(worlds: Any, kind: str, late: bool) -> None:
    torch.manual_seed(0)
    truth = Penalized(late)
    penalties = train(
        lambda loss: loss.backward(),
        lambda optimizer: optimizer.step(),
        truth,
        _OPTIMIZERS[kind](truth.parameters()),
        lambda batch: batch,
        evaluated=not late,
    )
    for found, weights, outside in worlds(2).run(listed, kind, late):
        assert found == pytest.approx(penalties, rel=1e-5)
        oracle.assert_same_weights(weights, truth.state_dict(), 1e-5)
        assert set(outside) == {torch.Size([0])}, "what is listed outside a forward stays away"


class Asking(nn.Module):
    """Asks its first parameter for its dtype, as many models do, and notes what is whole while layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.whole: list[list[bool]] = []
        self.watched: list[nn.Parameter] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs.to(next(self.parameters()).dtype)))
        next(self.last.parameters())
        self.whole.append([bool(each.numel()) for each in self.watched])
        output: torch.Tensor = self.last(hidden)
        return output


def asked() -> list[list[bool]]:
    with get_strategy("deepspeed_stage_3", param_persistence_threshold=0) as strategy:
        module = Asking()
        model, [optimizer] = strategy.setup_module_and_optimizers(module, [_OPTIMIZERS["sgd"](module.parameters())])
        module.watched = list(model.parameters())
        for batch in models.batches("plain", 2, _BATCH):
            inputs, targets = models.share_of(strategy, batch)
            strategy.backward(nn.functional.mse_loss(model(inputs), targets), model)
            strategy.optimizer_step(optimizer)
        return module.whole


def test_what_asks_for_a_dtype_gathers_one_parameter(worlds: Any) -> None:
    for whole in worlds(2).run(asked):
        assert whole[0] == [False, False, True, False], "of the last layer, which has not run"
