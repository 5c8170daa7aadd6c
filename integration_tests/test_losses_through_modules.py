"""Micro-batches whose losses come through two modules, or now through one and now through the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import models, oracle, set_up

#: What is run with both modules, halves of a batch, a backward and the context in which a module's gradients wait.
Loop = Callable[[Any, Any, torch.Tensor, Any, Any], None]

LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ddp": (2, "ddp", {}),
    "fsdp": (2, "fsdp", {}),
    "hsdp": (4, "hsdp", {"device_mesh": (2, 2)}),
    "tp": (2, "tp", {"tensor_parallel_size": 1}),
    "deepspeed": (2, "deepspeed_stage_1", {}),
}
#: Where the last backward averages what waits in modules that it has not come through; elsewhere the step refuses.
AVERAGES = {"ddp"}


def through_both(first: Any, second: Any, halves: Any, backward: Any, deferred: Any) -> None:
    with deferred(first), deferred(second):
        backward(second(first(halves[0])).square().mean(), second)
    backward(second(first(halves[1])).square().mean(), second)


def named_after_either(first: Any, second: Any, halves: Any, backward: Any, deferred: Any) -> None:
    with deferred(first):
        backward(second(first(halves[0])).square().mean(), first)
    backward(second(first(halves[1])).square().mean(), second)


def then_the_second_alone(first: Any, second: Any, halves: Any, backward: Any, deferred: Any) -> None:
    with deferred(first), deferred(second):
        backward(second(first(halves[0])).square().mean(), second)
    backward(second(halves[1]).square().mean(), second)


REACHING: dict[str, Loop] = {each.__name__: each for each in (through_both, named_after_either)}
LOOPS = REACHING | {then_the_second_alone.__name__: then_the_second_alone}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(inputs))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5)


def batch() -> torch.Tensor:
    ((inputs, _),) = models.batches("plain", 1, 16)
    return inputs


def in_plain_pytorch(loop: str) -> list[dict[str, torch.Tensor]]:
    modules = []
    for seed in range(2):
        torch.manual_seed(seed)
        modules.append(Layer())
    optimizers = [sgd(module) for module in modules]
    LOOPS[loop](*modules, batch().chunk(2), lambda loss, _: loss.backward(), lambda _: contextlib.nullcontext())
    for optimizer in optimizers:
        optimizer.step()
    return [module.state_dict() for module in modules]


def step(strategy: Any, modules: Any, optimizers: Any) -> list[str]:
    """Clip and step every module; return what each raises."""
    messages = []
    for module, optimizer in zip(modules, optimizers, strict=True):
        try:
            strategy.clip_gradients_norm(module, optimizer, 1e6)
            strategy.optimizer_step(optimizer)
            messages.append("")
        except SetupError as error:
            messages.append(str(error))
    return messages


def under_a_strategy(layout: str, loop: str) -> tuple[list[str], list[dict[str, torch.Tensor]]]:
    """Run a loop and step both modules; return what the steps raise, and the weights."""
    _, name, options = LAYOUTS[layout]
    with get_strategy(name, **options) as strategy:
        modules, optimizers = zip(*(set_up(strategy, Layer, sgd, seed=seed) for seed in range(2)), strict=True)
        halves = [models.share_of(strategy, (half,))[0] for half in batch().chunk(2)]
        LOOPS[loop](*modules, halves, strategy.backward, strategy.no_backward_sync)
        messages = step(strategy, modules, optimizers)
        return messages, [strategy.module_state_dict(module) for module in modules]


def stepped_inside(layout: str) -> list[str]:
    """Step both modules after a backward that names the second, inside both contexts; return what is raised."""
    _, name, options = LAYOUTS[layout]
    with get_strategy(name, **options) as strategy:
        modules, optimizers = zip(*(set_up(strategy, Layer, sgd) for _ in range(2)), strict=True)
        first, second = modules
        with strategy.no_backward_sync(first), strategy.no_backward_sync(second):
            strategy.backward(second(first(*models.share_of(strategy, (batch(),)))).square().mean(), second)
        return step(strategy, modules, optimizers)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_backward_inside_lets_no_module_step_that_it_may_have_come_through(worlds: Any, layout: str) -> None:
    for messages in worlds(LAYOUTS[layout][0]).run(stepped_inside, layout):
        for message in messages:
            assert message.startswith("the last backward was inside no_backward_sync")


@pytest.mark.parametrize("loop", REACHING)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_backward_outside_averages_every_module_that_it_comes_through(worlds: Any, layout: str, loop: str) -> None:
    truth = in_plain_pytorch(loop)
    answers = worlds(LAYOUTS[layout][0]).run(under_a_strategy, layout, loop)
    assert [messages for messages, _ in answers] == [["", ""]] * len(answers)
    for mine, expected in zip(answers[0][1], truth, strict=True):
        oracle.assert_same_weights(mine, expected, 1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_waits_in_a_module_that_the_last_backward_missed_is_averaged_or_refused(worlds: Any, layout: str) -> None:
    truth = in_plain_pytorch(then_the_second_alone.__name__)
    answers = worlds(LAYOUTS[layout][0]).run(under_a_strategy, layout, then_the_second_alone.__name__)
    for (first, second), _ in answers:
        assert second == ""
        assert bool(first) is (layout not in AVERAGES), first
    places = (0, 1) if layout in AVERAGES else (1,)
    for place in places:
        oracle.assert_same_weights(answers[0][1][place], truth[place], 1e-6)
