"""Modules that are made, or set up, in ``torch.inference_mode``."""

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import oracle

NAMES = ["single", "ddp"]


def made_inside(name: str) -> str:
    with get_strategy(name) as strategy:
        with torch.inference_mode():
            module = nn.Sequential(nn.Linear(4, 2))
        with pytest.raises(SetupError) as error:
            strategy.setup_module(module)
        return str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_made_inside_is_not_trained(worlds: Any, name: str) -> None:
    for message in worlds(1 if name == "single" else 2).run(made_inside, name):
        assert message.startswith("parameter '0.weight' was made in torch.inference_mode()"), message
        assert "requires_grad_(False)" in message


def frozen_inside(name: str) -> torch.Tensor:
    with get_strategy(name) as strategy:
        with torch.inference_mode():
            module = nn.Linear(4, 2).requires_grad_(False)
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        model = strategy.setup_module(module)
        with torch.inference_mode():
            return model(torch.ones(1, 4)).clone()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_frozen_is_evaluated(worlds: Any, name: str) -> None:
    for outputs in worlds(1 if name == "single" else 2).run(frozen_inside, name):
        assert outputs.tolist() == [[4.0, 4.0]]


def trained(name: str, inside: bool) -> dict[str, torch.Tensor]:
    """Set up, in inference mode or not, and train."""
    torch.manual_seed(0)
    with get_strategy(name) as strategy:
        module = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        with torch.inference_mode(inside):
            model, _ = strategy.setup_module_and_optimizers(module, [optimizer])
            assert torch.is_inference_mode_enabled() == inside
        for _ in range(2):
            strategy.backward(model(torch.ones(2, 4)).square().mean(), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return strategy.module_state_dict(model)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_set_up_inside_trains(worlds: Any, name: str) -> None:
    world = worlds(1 if name == "single" else 2)
    oracle.assert_same_weights(world.run(trained, name, True)[0], world.run(trained, name, False)[0], 0)
