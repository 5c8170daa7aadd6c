"""Copies of modules that were set up: plain ones where a rank has all that there is to copy, or our own sentence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from shard_core import SetupError, get_strategy
from shard_core.testing import set_up

#: Ranks, strategy and options.
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "single": (1, "single", {}),
    "single in bfloat16": (1, "single", {"precision": "bf16-mixed"}),
    "ddp": (2, "ddp", {}),
    "fsdp": (2, "fsdp", {}),
    "tp": (2, "tp", {"tensor_parallel_size": 2, "plan": {"hidden": "colwise", "out": "rowwise"}}),
    "deepspeed 2": (2, "deepspeed_stage_2", {}),
    "deepspeed 3": (2, "deepspeed_stage_3", {"param_persistence_threshold": 0}),
}
#: Where every rank has all that there is to copy.
COPIED = {"single", "single in bfloat16", "ddp"}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 8)
        self.norm = nn.Tanh()
        self.out = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.hidden(inputs)))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5)


def train(strategy: Any, model: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    strategy.backward(model(inputs).square().mean(), model)
    optimizer.step()
    optimizer.zero_grad()


def copied(layout: str, by: str) -> tuple[str, list[float]]:
    """Copy a module between two steps.

    Returns:
        What was refused; how far the copy's outputs are from the module's, before and after a step of the module alone.
    """
    _, name, options = LAYOUTS[layout]
    with get_strategy(name, **options) as strategy:
        model, optimizer = set_up(strategy, Network, sgd)
        inputs = torch.randn(8, 6)
        train(strategy, model, optimizer, inputs)
        try:
            copies = {
                "deepcopy": lambda: copy.deepcopy(model),
                "AveragedModel": lambda: AveragedModel(model),
                "unwrapped": lambda: copy.deepcopy(strategy.unwrap(model)),
                "part": lambda: nn.Sequential(copy.deepcopy(strategy.unwrap(model).hidden), model.norm, model.out),
            }
            other = copies[by]()
        except SetupError as error:
            train(strategy, model, optimizer, inputs)
            return str(error), []
        apart = []
        for _ in range(2):
            model.eval(), other.eval()
            apart.append(float((model(inputs) - other(inputs)).abs().max().detach()))
            model.train(), other.train()
            train(strategy, model, optimizer, inputs)
        # Nobody averages or refuses what a copy does.
        other(inputs).sum().backward()
        assert all(each.grad is not None for each in other.parameters())
        return "", apart


@pytest.mark.parametrize("by", ["deepcopy", "AveragedModel", "unwrapped"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_is_the_plain_module_or_refused(worlds: Any, layout: str, by: str) -> None:
    for message, apart in worlds(LAYOUTS[layout][0]).run(copied, layout, by):
        if layout in COPIED:
            assert message == ""
            assert apart[0] == 0
            assert apart[1] > 1e-3
        else:
            assert "strategy.module_state_dict(model)" in message, message


@pytest.mark.parametrize("layout", ["fsdp", "deepspeed 3"])
def test_no_part_is_copied_of_what_is_sharded(worlds: Any, layout: str) -> None:
    for message, _ in worlds(LAYOUTS[layout][0]).run(copied, layout, "part"):
        assert message.startswith("a module was copied after its setup"), message
