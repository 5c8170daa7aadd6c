"""Embeddings with max_norm are refused where ranks would rescale rows apart, and train or evaluate elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.errors import SetupError

SAMPLES = [torch.tensor([1, 2, 3, 4]), torch.tensor([3, 5, 6, 0]), torch.tensor([1, 1, 7, 2])]


def made(frozen: bool) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    module[0].requires_grad_(not frozen)
    return module


def descending(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in module.parameters() if each.requires_grad], lr=0.5)


def trained_frozen() -> dict[str, torch.Tensor]:
    with get_strategy("ddp") as strategy:
        module = made(frozen=True)
        model, (optimizer,) = strategy.setup_module_and_optimizers(module, [descending(module)])
        for samples in SAMPLES:
            strategy.backward(model(samples.chunk(2)[strategy.global_rank]).square().mean(), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return {"outputs": module(torch.arange(8)).detach(), **dict(module[1:].state_dict())}


def test_a_frozen_embedding_gives_the_outputs_of_plain_pytorch(worlds: Any) -> None:
    module = made(frozen=True)
    optimizer = descending(module)
    for samples in SAMPLES:
        module(samples).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    truth = {"outputs": module(torch.arange(8)).detach(), **dict(module[1:].state_dict())}
    for answer in worlds(2).run(trained_frozen):
        torch.testing.assert_close(answer, truth)


def at_setup(strategy: Any) -> None:
    module = made(frozen=False)
    strategy.setup_module_and_optimizers(module, [descending(module)])


def at_a_later_optimizer(strategy: Any) -> None:
    module = made(frozen=False)
    strategy.setup_module(module)
    strategy.setup_optimizer(descending(module))


def at_a_backward(strategy: Any) -> None:
    model = strategy.setup_module(made(frozen=False))
    strategy.backward(model(SAMPLES[0]).sum(), model)


def at_a_backward_after_unfreezing(strategy: Any) -> None:
    module = made(frozen=True)
    model, _ = strategy.setup_module_and_optimizers(module, [torch.optim.SGD(module.parameters(), lr=0.1)])
    module.requires_grad_(True)
    strategy.backward(model(SAMPLES[0]).sum(), model)


def refused(attempt: Callable[[Any], None]) -> str:
    with get_strategy("ddp") as strategy:
        try:
            attempt(strategy)
        except SetupError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    "attempt",
    [at_setup, at_a_later_optimizer, at_a_backward, at_a_backward_after_unfreezing],
    ids=lambda each: each.__name__,
)
def test_a_trained_embedding_is_refused(worlds: Any, attempt: Callable[[Any], None]) -> None:
    for message in worlds(2).run(refused, attempt):
        assert "the embedding '0' has max_norm, by which each rank would rescale the rows of its own" in message


def evaluated() -> torch.Tensor:
    with get_strategy("ddp") as strategy, torch.no_grad():
        outputs: torch.Tensor = strategy.setup_module(made(frozen=False))(torch.arange(8))
        return outputs


def test_what_is_never_trained_is_evaluated(worlds: Any) -> None:
    with torch.no_grad():
        truth = made(frozen=False)(torch.arange(8))
    for outputs in worlds(2).run(evaluated):
        torch.testing.assert_close(outputs, truth)
