"""Which modules' gradients wait for a backward outside of their ``no_backward_sync``, where there are several."""

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy


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
