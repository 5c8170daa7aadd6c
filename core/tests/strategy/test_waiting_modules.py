"""Which modules' gradients wait for a backward outside of their ``no_backward_sync``, where there are several."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy


def another_module_between(name: str) -> tuple[list[str], float, list[float]]:
    """Return what steps raise of a module that waits, after a backward of another one; and its gradient after its own.

    Its own is of a loss that another module's name is given for.
    """
    with get_strategy(name) as strategy:
        modules = [nn.Linear(3, 1, bias=False) for _ in range(2)]
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in modules]
        (critic, (steps,)), (model, _) = (
            strategy.setup_module_and_optimizers(module, [optimizer])
            for module, optimizer in zip(modules, optimizers, strict=True)
        )
        given = torch.eye(3) * (1 + strategy.global_rank)
        with strategy.no_backward_sync(critic):
            strategy.backward(critic(given).sum(), critic)
        messages = []
        for _ in range(2):
            strategy.backward(model(given).sum(), model)
            with pytest.raises(SetupError) as error:
                strategy.optimizer_step(steps)
            messages.append(str(error.value))
        strategy.backward(critic(given).sum(), model)
        norm = strategy.clip_gradients_norm(critic, steps, math.inf, float("inf"))
        assert strategy.optimizer_step(steps)
        return messages, norm.item(), strategy.broadcast(strategy.module_gradients(critic))["weight"].flatten().tolist()


def waits_that_end(name: str) -> list[str]:
    """Step a module whose context was entered, in ways that leave nothing of it waiting; return what did."""
    stepped = []
    with get_strategy(name) as strategy:
        given = torch.eye(3) * (1 + strategy.global_rank)

        def ready(trained: bool = True) -> Any:
            module = nn.Linear(3, 3, bias=False).requires_grad_(trained)
            model, (steps,) = strategy.setup_module_and_optimizers(module, [torch.optim.SGD(module.parameters(), 0.1)])
            return model, steps

        (model, _), (critic, steps) = ready(), ready()
        strategy.backward(critic(given).sum(), critic)
        with strategy.no_backward_sync(critic), strategy.no_backward_sync(model):
            strategy.backward(model(given).sum(), model)
        strategy.backward(model(given).sum(), model)
        strategy.optimizer_step(steps)
        stepped.append("not reached inside")
        with strategy.no_backward_sync(critic):
            strategy.backward(critic(given).sum(), critic)
        critic.zero_grad()
        strategy.backward(model(given).sum(), model)
        strategy.optimizer_step(steps)
        stepped.append("zeroed")
        with strategy.no_backward_sync(critic):
            strategy.backward(critic(given).sum(), critic)
        hidden = torch.utils.checkpoint.checkpoint(critic, model(given), use_reentrant=True)
        strategy.backward(hidden.sum(), model)
        strategy.optimizer_step(steps)
        stepped.append("hidden by activation checkpointing")
        frozen, steps = ready(trained=False)
        with strategy.no_backward_sync(frozen):
            strategy.backward(frozen(model(given)).sum(), frozen)
        strategy.backward(frozen(model(given)).sum(), model)
        strategy.optimizer_step(steps)
        stepped.append("frozen")
    return stepped


@pytest.mark.parametrize("name", ["single", "ddp"])
def test_nothing_waits_that_was_not_reached_or_was_zeroed(name: str, worlds: Any) -> None:
    for stepped in worlds(1 if name == "single" else 2).run(waits_that_end, name):
        assert stepped == ["not reached inside", "zeroed", "hidden by activation checkpointing", "frozen"]


@pytest.mark.parametrize("name", ["single", "ddp"])
def test_a_backward_of_another_module_does_not_end_the_wait(name: str, worlds: Any) -> None:
    for messages, norm, gradient in worlds(1 if name == "single" else 2).run(another_module_between, name):
        assert all("the last backward outside did not come through its module" in each for each in messages)
        expected = 2.0 if name == "single" else 3.0
        assert norm == expected
        assert gradient == [expected] * 3
