"""What was kept of ``p.grad`` is no other gradient's later on, and no data is put in its place without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import models, set_up


def keep(stage: int, drops: str) -> str:
    with get_strategy("deepspeed", stage=stage) as strategy:
        model, optimizer = set_up(
            strategy, lambda: nn.Linear(6, 3), lambda module: torch.optim.SGD(module.parameters(), lr=0.1)
        )
        inputs, targets = models.share_of(strategy, models.batches("plain", 1, 12)[0])
        own = strategy.unwrap(model)
        for _ in range(2):
            strategy.backward(nn.functional.mse_loss(model(inputs), targets), model)
            kept = own.weight.grad
            with pytest.raises(SetupError, match="clip_gradients_norm"):
                own.bias.grad.data = torch.ones(3)
            (own if drops == "module" else optimizer).zero_grad()
        strategy.backward(nn.functional.mse_loss(model(inputs), targets), model)
        with pytest.raises(SetupError, match="clip_gradients_norm"):
            kept.mul_(0.5)
        own.weight.grad = kept
        with pytest.raises(SetupError) as error:
            strategy.optimizer_step(optimizer)
        return str(error.value)


@pytest.mark.parametrize("drops", ["module", "optimizer"])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_was_kept_of_a_gradient_is_refused(worlds: Any, stage: int, drops: str) -> None:
    for message in worlds(2).run(keep, stage, drops):
        assert "put into .grad of 'weight'" in message
