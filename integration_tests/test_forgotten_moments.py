"""What loops do to optimizer state by a parameter of the module, as when a head is drawn anew and begins afresh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.testing import oracle, set_up

LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ddp": (2, "ddp", {}),
    "fsdp": (2, "fsdp", {}),
    "tp": (2, "tp", {"tensor_parallel_size": 2, "plan": {"hidden": "colwise", "out": "rowwise"}}),
    "deepspeed 0": (2, "deepspeed", {"stage": 0}),
    "deepspeed 1": (2, "deepspeed_stage_1", {}),
    "deepspeed 2": (2, "deepspeed_stage_2", {}),
    "deepspeed 3": (2, "deepspeed_stage_3", {"param_persistence_threshold": 0}),
}
OTHERS = ("ddp", "tp", "deepspeed 0", "deepspeed 1")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(inputs)))


def popped(optimizer: Any, parameter: torch.Tensor) -> None:
    optimizer.state.pop(parameter, None)


def deleted(optimizer: Any, parameter: torch.Tensor) -> None:
    if parameter in optimizer.state:
        del optimizer.state[parameter]


def emptied(optimizer: Any, parameter: torch.Tensor) -> None:
    optimizer.state[parameter] = {}


def zeroed(optimizer: Any, parameter: torch.Tensor) -> None:
    for value in optimizer.state.get(parameter, {}).values():
        value.zero_()


def zeroed_after_a_load(optimizer: Any, parameter: torch.Tensor) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    for value in optimizer.state[parameter].values():
        value.zero_()


def put_in_place(optimizer: Any, parameter: torch.Tensor) -> None:
    whole = torch.linspace(0, 1, 24).reshape(3, 8)
    optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": whole, "exp_avg_sq": whole + 1}


def put_by_update(optimizer: Any, parameter: torch.Tensor) -> None:
    whole = torch.linspace(0, 1, 24).reshape(3, 8)
    optimizer.state.update({parameter: {"step": torch.tensor(3.0), "exp_avg": whole, "exp_avg_sq": whole + 1}})


CHANGES: dict[str, Callable[[Any, torch.Tensor], None]] = {
    each.__name__: each for each in (popped, deleted, emptied, zeroed, zeroed_after_a_load, put_in_place, put_by_update)
}


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def train(model: Any, head: torch.Tensor, optimizer: Any, change: str, backward: Any, step: Any) -> None:
    inputs = torch.linspace(-1, 1, 24).reshape(4, 6)
    for number in range(4):
        if number == 2:
            CHANGES[change](optimizer, head)
        backward(model(inputs * (number + 1)).square().mean())
        step(optimizer)
        optimizer.zero_grad()


def under_a_strategy(layout: str, change: str) -> dict[str, torch.Tensor]:
    _, name, options = LAYOUTS[layout]
    with get_strategy(name, **options) as strategy:
        model, optimizer = set_up(strategy, Network, adamw)
        head = strategy.unwrap(model).out.weight
        train(model, head, optimizer, change, lambda loss: strategy.backward(loss, model), strategy.optimizer_step)
        return strategy.module_state_dict(model)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "layout", ["fsdp", *[pytest.param(each, marks=pytest.mark.long) for each in OTHERS], "deepspeed 2", "deepspeed 3"]
)
def test_state_is_found_by_the_parameter_of_the_module(worlds: Any, layout: str, change: str) -> None:
    torch.manual_seed(0)
    plain = Network()
    train(plain, plain.out.weight, adamw(plain), change, lambda loss: loss.backward(), lambda each: each.step())
    weights, *_ = worlds(LAYOUTS[layout][0]).run(under_a_strategy, layout, change)
    oracle.assert_same_weights(weights, plain.state_dict(), 1e-5)
