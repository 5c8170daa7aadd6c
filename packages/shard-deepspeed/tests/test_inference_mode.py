"""Modules that are set up in ``torch.inference_mode`` train; those that are made in it are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import oracle


def made_inside(stage: int) -> str:
    with get_strategy("deepspeed", stage=stage) as strategy:
        with torch.inference_mode():
            module = nn.Sequential(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with pytest.raises(SetupError) as error:
            strategy.setup_module_and_optimizers(module, [optimizer])
        return str(error.value)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_made_inside_is_not_trained(worlds: Any, stage: int) -> None:
    for message in worlds(2).run(made_inside, stage):
        assert message.startswith("parameter '0.weight' was made in torch.inference_mode()"), message


def trained(stage: int, inside: bool, late: bool) -> dict[str, torch.Tensor]:
    """Set up, in inference mode or not, and train."""
    torch.manual_seed(0)
    options = {"param_persistence_threshold": 0} if stage == 3 else {}
    with get_strategy("deepspeed", stage=stage, **options) as strategy:
        module = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        with torch.inference_mode(inside):
            if late:
                model = strategy.setup_module(module)
                strategy.setup_optimizer(optimizer)
            else:
                model, _ = strategy.setup_module_and_optimizers(module, [optimizer])
        for _ in range(2):
            strategy.backward(model(torch.ones(2, 4)).square().mean(), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            with torch.inference_mode(inside):
                model(torch.ones(2, 4))
        return strategy.module_state_dict(model)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_set_up_inside_trains(worlds: Any, stage: int, late: bool) -> None:
    world = worlds(2)
    outside = world.run(trained, stage, False, late)[0]
    oracle.assert_same_weights(world.run(trained, stage, True, late)[0], outside, 0)
