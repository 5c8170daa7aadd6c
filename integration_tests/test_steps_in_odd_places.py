"""Steps with hooks, closures and groups of other modules come to what they do in plain PyTorch, or are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from shard_core import SetupError, get_strategy

STRATEGIES = ("ddp", "fsdp", "hsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
WAITING = ("fsdp", "hsdp", "deepspeed_stage_1")
"""Those of them that keep a module's deferred gradients waiting until a backward of its own."""
RANKS, ROWS = 2, 4
Weights = dict[str, torch.Tensor]


def sgd(*modules: nn.Module) -> optim.Optimizer:
    return optim.SGD([each for module in modules for each in module.parameters()], lr=0.1, momentum=0.9)


def batches() -> torch.Tensor:
    return torch.randn(RANKS, ROWS, 6, generator=torch.Generator().manual_seed(1))


class Loop:
    """A loop of a strategy's."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def set_up(self, module: nn.Module, *optimizers: optim.Optimizer) -> nn.Module:
        return self.strategy.setup_module_and_optimizers(module, list(optimizers))[0]

    def own(self, module: nn.Module) -> nn.Module:
        return self.strategy.unwrap(module)

    def backward(self, *modules: nn.Module, count: bool = True, last: bool = True) -> torch.Tensor:
        """Go backward from this rank's loss, a sum over what its denominator counts, or a mean."""
        with self.strategy.no_backward_sync(modules[-1], enabled=not last):
            squares = _outputs(modules, batches()[self.strategy.global_rank]).square()
            loss = squares.sum() if count else squares.mean()
            self.strategy.backward(loss, modules[-1], denominator=squares.numel() if count else None)
        return loss.detach()

    def weights(self, module: nn.Module) -> Weights:
        return self.strategy.broadcast(self.strategy.module_state_dict(module))


class PlainLoop(Loop):
    """The same loop in one process, over all ranks' rows."""

    def __init__(self) -> None:
        super().__init__(None)

    def set_up(self, module: nn.Module, *optimizers: optim.Optimizer) -> nn.Module:
        return module

    def own(self, module: nn.Module) -> nn.Module:
        return module

    def backward(self, *modules: nn.Module, count: bool = True, last: bool = True) -> torch.Tensor:
        loss = _outputs(modules, batches().flatten(0, 1)).square().mean()
        loss.backward()
        return loss.detach()

    def weights(self, module: nn.Module) -> Weights:
        return {name: value.detach().clone() for name, value in module.named_parameters()}


def _outputs(modules: tuple[nn.Module, ...], rows: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = sum(module(rows) for module in modules)  # type: ignore[assignment]
    return total


def _take_steps(loop: Loop, model: nn.Module, optimizer: optim.Optimizer) -> None:
    for _ in range(3):
        loop.backward(model)
        optimizer.step()
        optimizer.zero_grad()


def hooks_after_a_step_see_it(loop: Loop, one: nn.Module, two: nn.Module) -> list[Any]:
    optimizer = sgd(one)
    model = loop.set_up(one, optimizer)
    seen: list[Any] = []

    def look(*_: object) -> None:
        with torch.no_grad():
            seen.append(model(batches().flatten(0, 1)).square().mean())

    optimizer.register_step_post_hook(look)
    _take_steps(loop, model, optimizer)
    return [*seen, loop.weights(model)]


def hooks_after_a_step_change_weights(loop: Loop, one: nn.Module, two: nn.Module) -> list[Any]:
    optimizer = sgd(one)
    model = loop.set_up(one, optimizer)

    def shrink(*_: object) -> None:
        with torch.no_grad():
            for parameter in loop.own(model).parameters():
                parameter.mul_(0.5)

    optimizer.register_step_post_hook(shrink)
    _take_steps(loop, model, optimizer)
    return [loop.weights(model)]


def hooks_before_a_step_drop_a_gradient(loop: Loop, one: nn.Module, two: nn.Module) -> list[Any]:
    optimizer = sgd(one)
    model = loop.set_up(one, optimizer)

    def drop(*_: object) -> None:
        loop.own(model).bias.grad = None

    optimizer.register_step_pre_hook(drop)
    _take_steps(loop, model, optimizer)
    return [loop.weights(model)]


def hooks_after_a_step_fail(loop: Loop, one: nn.Module, two: nn.Module) -> list[Any]:
    optimizer = sgd(one)
    model = loop.set_up(one, optimizer)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    optimizer.register_step_post_hook(fail)
    for _ in range(2):
        loop.backward(model)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        optimizer.zero_grad()
    return [loop.weights(model)]


def closure_steps_with_what_was_there(loop: Loop, one: nn.Module, two: nn.Module) -> list[Any]:
    optimizer = sgd(one)
    model = loop.set_up(one, optimizer)
    for _ in range(2):
        loss = loop.backward(model)
        optimizer.step(lambda loss=loss: loss)
        optimizer.zero_grad()
    return [loop.weights(model)]


def closure_adds_to_what_was_there(loop: Loop, one: nn.Module, two: nn.Module) -> list[Any]:
    optimizer = sgd(one)
    model = loop.set_up(one, optimizer)
    for _ in range(2):
        if loop.strategy is not None:
            loop.backward(model)  # twice the sum over twice the count
        optimizer.step(lambda: loop.backward(model))
        optimizer.zero_grad()
    return [loop.weights(model)]


def two_optimizers_step_one_module(loop: Loop, one: nn.Module, two: nn.Module) -> list[Any]:
    first, second = sgd(one), sgd(one)
    model = loop.set_up(one, first, second)
    for _ in range(2):
        loop.backward(model)
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    return [loop.weights(model)]


def a_group_of_another_module(loop: Loop, one: nn.Module, two: nn.Module) -> list[Any]:
    optimizer = sgd(one)
    first, second = loop.set_up(one, optimizer), loop.set_up(two)
    optimizer.add_param_group({"params": list(loop.own(second).parameters()), "lr": 0.05})
    for through in ((second,), (first,), (second,)):
        loop.backward(*through)
        optimizer.step()
        optimizer.zero_grad()
    return [loop.weights(first), loop.weights(second)]


SAME = (
    hooks_after_a_step_see_it,
    hooks_after_a_step_change_weights,
    hooks_before_a_step_drop_a_gradient,
    hooks_after_a_step_fail,
    closure_steps_with_what_was_there,
    closure_adds_to_what_was_there,
    two_optimizers_step_one_module,
    a_group_of_another_module,
)


def modules() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(6, 3), nn.Linear(6, 3)


def trained(name: str, scenario: Callable[..., list[Any]]) -> list[Any]:
    with get_strategy(name, accelerator="cpu") as strategy:
        return scenario(Loop(strategy), *modules())


@pytest.mark.parametrize("scenario", SAME, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_is_plain_pytorchs(worlds: Any, name: str, scenario: Callable[..., list[Any]]) -> None:
    expected = scenario(PlainLoop(), *modules())
    for found in worlds(RANKS).run(trained, name, scenario):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def refusals(name: str) -> list[str]:
    """Return what is said to steps that cannot be right."""
    said = []
    with get_strategy(name, accelerator="cpu") as strategy:
        loop, (one, two) = Loop(strategy), modules()
        optimizer = sgd(one)
        first, second = loop.set_up(one, optimizer), loop.set_up(two)
        with pytest.raises(SetupError) as raised:
            strategy.setup_optimizer(optimizer)
        said.append(str(raised.value))
        optimizer.add_param_group({"params": list(loop.own(second).parameters())})
        loop.backward(first)
        with pytest.raises(SetupError) as raised:
            loop.backward(second)  # whose gradients need another denominator
        said.append(str(raised.value))
        optimizer.zero_grad()
        loop.backward(second, count=False, last=False)
        with pytest.raises(SetupError) if name in WAITING else contextlib.nullcontext() as raised:
            optimizer.step(lambda: loop.backward(first, count=False))
        said.append(str(raised.value) if raised else "no_backward_sync is done with")
    return said


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_cannot_be_right_is_refused(worlds: Any, name: str) -> None:
    for said in worlds(RANKS).run(refusals, name):
        twice, apart, waiting = said
        assert "was set up already" in twice
        assert "denominator" in apart
        assert "no_backward_sync" in waiting


def stepped_without_setup(name: str) -> str:
    with get_strategy(name, accelerator="cpu") as strategy:
        loop, (one, _) = Loop(strategy), modules()
        model = loop.set_up(one)
        optimizer = sgd(loop.own(model))
        loop.backward(model, count=False)
        optimizer.step()  # as nothing is to be divided
        optimizer.zero_grad()
        loop.backward(model)
        with pytest.raises(SetupError) as raised:
            optimizer.step()
        return str(raised.value)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_an_optimizer_that_was_not_set_up_steps_nothing_that_waits(worlds: Any, name: str) -> None:
    for said in worlds(RANKS).run(stepped_without_setup, name):
        assert said.startswith("this SGD was not set up")


def trained_in_backward(name: str) -> Weights:
    with get_strategy(name, accelerator="cpu") as strategy:
        loop, (one, _) = Loop(strategy), modules()
        model = loop.set_up(one, *(own := [momentum(each) for each in one.parameters()]))
        _step_in_backwards(own)
        for _ in range(3):
            loop.backward(model, count=False)
        return loop.weights(model)


def _step_in_backwards(optimizers: list[optim.Optimizer]) -> None:
    """Step each optimizer as soon as its parameter's gradient is there."""
    own = {optimizer.param_groups[0]["params"][0]: optimizer for optimizer in optimizers}

    def step(parameter: torch.Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(step)


def momentum(parameter: nn.Parameter) -> optim.Optimizer:
    return optim.SGD([parameter], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("name", ["fsdp", "hsdp"])
def test_steps_inside_a_backward_are_plain_pytorchs(worlds: Any, name: str) -> None:
    loop, (one, _) = PlainLoop(), modules()
    _step_in_backwards([momentum(each) for each in one.parameters()])
    for _ in range(3):
        loop.backward(one)
    for found in worlds(RANKS).run(trained_in_backward, name):
        torch.testing.assert_close(found, loop.weights(one), rtol=1e-4, atol=1e-6)


def stepped_in_backward() -> str:
    with get_strategy("ddp", accelerator="cpu") as strategy:
        loop, (one, _) = Loop(strategy), modules()
        own = {each: optim.SGD([each], lr=0.1) for each in one.parameters()}
        model = loop.set_up(one, *own.values())
        for each in own:
            each.register_post_accumulate_grad_hook(lambda parameter: own[parameter].step())
        with pytest.raises(SetupError) as raised:
            loop.backward(model, count=False)
        return str(raised.value)


def test_a_step_inside_a_backward_of_ddp_is_refused(worlds: Any) -> None:
    for said in worlds(RANKS).run(stepped_in_backward):
        assert "inside a backward" in said
