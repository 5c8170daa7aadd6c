"""Gradients are shown as a step would take them, and looking changes nothing."""

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.errors import InvalidOption, SetupError


def build(strategy: Any, made: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    strategy.seed_everything(0)
    module = made or nn.Linear(3, 1, bias=False)
    module, (optimizer,) = strategy.setup_module_and_optimizers(module, [torch.optim.SGD(module.parameters(), lr=1.0)])
    return module, optimizer


def loss_of(strategy: Any, module: nn.Module) -> torch.Tensor:
    """Return one whose gradient is the data rank's number plus one, in every element."""
    scale = strategy.distributed_sampler_kwargs["rank"] + 1.0
    return module(torch.full((1, 3), scale, device=strategy.root_device)).float().sum()


def shown_at_every_moment() -> list[Any]:
    with get_strategy("ddp") as strategy:
        module, optimizer = build(strategy)
        looks: list[Any] = [strategy.module_gradients(module)]
        strategy.backward(loss_of(strategy, module), module)
        looks.append(strategy.module_gradients(module))
        with strategy.no_backward_sync(module):
            strategy.backward(loss_of(strategy, module), module)
        with pytest.raises(SetupError, match="last backward was inside no_backward_sync"):
            strategy.module_gradients(module)
        strategy.backward(loss_of(strategy, module), module)
        looks.append(strategy.module_gradients(module))
        strategy.clip_gradients_value(module, optimizer, 1.0)
        looks.append(strategy.module_gradients(module))
        strategy.optimizer_step(optimizer)
        looks.append(strategy.module_gradients(module))
        optimizer.zero_grad()
        looks.append(strategy.module_gradients(module))
        return looks


def test_gradients_at_every_moment_of_a_step(worlds: Any) -> None:
    first, second = worlds(2).run(shown_at_every_moment)
    assert [{name: g.tolist() for name, g in look.items()} for look in first] == [
        {},
        {"weight": [[1.5] * 3]},
        {"weight": [[4.5] * 3]},
        {"weight": [[1.0] * 3]},
        {"weight": [[1.0] * 3]},
        {},
    ]
    assert second == [{}] * 6


def unscaled() -> list[Any]:
    with get_strategy("ddp", precision="16-mixed") as strategy:
        module, optimizer = build(strategy)
        looks = []
        for weight in (0.25, float("inf")):
            strategy.backward(loss_of(strategy, module) * weight, module)
            looks.append(strategy.module_gradients(module))
            assert strategy.optimizer_step(optimizer) == (weight == 0.25)
            optimizer.zero_grad()
        return looks


def test_gradients_are_shown_unscaled(worlds: Any) -> None:
    clean, spoiled = worlds(2).run(unscaled)[0]
    assert clean["weight"].tolist() == [[0.375] * 3]
    assert not spoiled["weight"].isfinite().any()


def without_optimizer() -> tuple[Any, Any, Any]:
    with get_strategy("ddp") as strategy:
        strategy.seed_everything(0)
        made = nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
        module = strategy.setup_module(made)
        for _ in range(2):
            strategy.backward(loss_of(strategy, module), module, denominator=3)
        before = strategy.module_gradients(module)
        strategy.setup_optimizer(optimizer)
        weight = strategy.module_state_dict(module)
        strategy.optimizer_step(optimizer)
        stepped = strategy.module_state_dict(module)
        return before, strategy.module_gradients(module), {name: weight[name] - stepped[name] for name in weight}


def test_denominators_wait_for_an_optimizer(worlds: Any) -> None:
    before, after, step = worlds(2).run(without_optimizer)[0]
    assert before["weight"].tolist() == after["weight"].tolist() == [[0.5] * 3]
    torch.testing.assert_close(step["weight"], torch.full((1, 3), 0.5))


class Branches(nn.Module):
    """Rank 0 alone goes through one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        return self.always(inputs) + (self.sometimes(inputs) if both else 0.0)


def partly_used() -> Any:
    with get_strategy("ddp", find_unused_parameters=True) as strategy:
        module, _ = build(strategy, Branches())
        strategy.backward(module(torch.ones(1, 3), both=strategy.global_rank == 0).sum(), module)
        return strategy.module_gradients(module)


def test_what_one_rank_has_left_out_counts_as_zeros(worlds: Any) -> None:
    shown = worlds(2).run(partly_used)[0]
    assert {name: g.tolist() for name, g in shown.items()} == {
        "always.weight": [[1.0] * 3],
        "sometimes.weight": [[0.5] * 3],
    }


def test_looks_are_copies_and_leave_no_trace() -> None:
    with get_strategy("single", accelerator="cpu") as strategy:
        module, optimizer = build(strategy)
        for full in (True, False):
            strategy.backward(loss_of(strategy, module), module)
            strategy.module_gradients(module, full=full)["weight"].zero_()
            assert strategy.module_gradients(module, full=full)["weight"].tolist() == [[1.0] * 3]
            strategy.optimizer_step(optimizer)
            assert not optimizer.state
            optimizer.zero_grad()


def test_full_optimizer_state_is_of_its_moment() -> None:
    with get_strategy("single", accelerator="cpu") as strategy:
        module = nn.Linear(3, 1)
        module, (optimizer,) = strategy.setup_module_and_optimizers(module, [torch.optim.AdamW(module.parameters())])
        for _ in range(2):
            strategy.backward(loss_of(strategy, module), module)
            strategy.optimizer_step(optimizer)
            shown = strategy.optimizer_state_dict(optimizer)["state"]["weight"]
            before = {slot: value.clone() for slot, value in shown.items()}
        strategy.optimizer_step(optimizer)
        assert {slot: torch.equal(value, before[slot]) for slot, value in shown.items()} == dict.fromkeys(before, True)


def test_denominators_of_nothing() -> None:
    with get_strategy("single", accelerator="cpu") as strategy:
        module, optimizer = build(strategy)
        strategy.backward(loss_of(strategy, module), module, denominator=0)
        for ask in (lambda: strategy.module_gradients(module), lambda: strategy.optimizer_step(optimizer)):
            with pytest.raises(InvalidOption, match="add up to 0"):
                ask()


def test_a_stranger_has_no_gradients() -> None:
    with get_strategy("single", accelerator="cpu") as strategy, pytest.raises(SetupError, match="was not set up"):
        strategy.module_gradients(nn.Linear(1, 1))
