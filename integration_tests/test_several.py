"""Several models, optimizers and strategies live side by side in one process."""

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy


def two_models(strategy_name: str) -> Any:
    """A generator and a discriminator, stepped in turn."""
    with get_strategy(strategy_name) as strategy:
        torch.manual_seed(0)
        made = [nn.Linear(2, 2), nn.Linear(2, 1)]
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in made]
        ready = [
            strategy.setup_module_and_optimizers(module, [optimizer])
            for module, optimizer in zip(made, optimizers, strict=True)
        ]
        (generator, (step_generator,)), (critic, (step_critic,)) = ready
        x = torch.linspace(-1, 1, 12).view(6, 2).chunk(strategy.world_size)[strategy.global_rank]
        for _ in range(3):
            strategy.backward(critic(generator(x).detach()).square().mean(), critic)
            strategy.optimizer_step(step_critic)
            step_critic.zero_grad()
            strategy.backward(-critic(generator(x)).mean(), generator)
            strategy.optimizer_step(step_generator)
            step_generator.zero_grad()
            step_critic.zero_grad()
        return [dict(strategy.full_parameters(module)) for module in (generator, critic)]


@pytest.mark.parametrize(("strategy", "size"), [("ddp", 2), ("ddp", 3), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3)])
def test_two_models_and_two_optimizers(worlds: Any, strategy: str, size: int) -> None:
    truth = worlds(1).run(two_models, "single")[0]
    for rank in worlds(size).run(two_models, strategy):
        for mine, expected in zip(rank, truth, strict=True):
            for name, tensor in expected.items():
                torch.testing.assert_close(mine[name], tensor, rtol=1e-6, atol=1e-7)


def two_optimizers(strategy_name: str) -> Any:
    """One model whose halves have an optimizer each, stepped at different rates."""
    with get_strategy(strategy_name) as strategy:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizers = [
            torch.optim.SGD(module[0].parameters(), lr=0.1),
            torch.optim.AdamW(module[2].parameters(), lr=0.1),
        ]
        module, (slow, fast) = strategy.setup_module_and_optimizers(module, optimizers)
        x = torch.linspace(-1, 1, 36).view(6, 2, 3)
        for step, batch in enumerate(x):
            mine = batch.chunk(strategy.world_size)[strategy.global_rank]
            strategy.backward(module(mine).square().mean(), module)
            strategy.optimizer_step(fast)
            fast.zero_grad()
            if step % 2:
                strategy.optimizer_step(slow)
                slow.zero_grad()
        return dict(strategy.full_parameters(module))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_optimizers_of_one_model(worlds: Any, strategy: str) -> None:
    truth = worlds(1).run(two_optimizers, "single")[0]
    for mine in worlds(2).run(two_optimizers, strategy):
        for name, tensor in truth.items():
            torch.testing.assert_close(mine[name], tensor, rtol=1e-5, atol=1e-6)


def one_after_another() -> list[int]:
    """Two strategies at once, then a third after both."""
    sums = []
    with get_strategy("ddp") as first, get_strategy("fsdp") as second:
        sums += [int(strategy.all_reduce(1, reduce_op="sum")) for strategy in (first, second)]
    with get_strategy("fsdp") as third:
        sums.append(int(third.all_reduce(1, reduce_op="sum")))
    return sums


def test_strategies_do_not_share_state(worlds: Any) -> None:
    assert worlds(2).run(one_after_another) == [[2, 2, 2]] * 2
