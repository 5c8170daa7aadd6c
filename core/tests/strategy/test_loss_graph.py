"""What a backward notes, its denominator and its loss scale, it notes of every module that its loss gives gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shard_core import get_strategy
from shard_core.errors import InvalidOption
from shard_core.strategy import step
from shard_core.strategy.loss_graph import reached_by
from shard_core.testing import oracle

MICROS = 2
LOSSES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], bool, float]] = {
    "denominator": ("32-true", lambda output: output.square().sum(), True, 1e-5),
    "scaler": ("16-mixed", lambda output: output.float().square().mean() * 1e-3, False, 5e-3),
}


def make() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), nn.Linear(6, 6)


def batch(rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1 + rank, 24).view(4, 6)[: 4 - rank]


def set_up(strategy: Any, module: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    module, (optimizer,) = strategy.setup_module_and_optimizers(module, [torch.optim.SGD(module.parameters(), lr=0.1)])
    return module, optimizer


def through_two(name: str, loss: str) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """Go backward through two modules, naming the second; return the gradients of both, and their norms."""
    precision, reduce, divided, _ = LOSSES[loss]
    with get_strategy(name, precision=precision) as strategy:
        ready = [set_up(strategy, module) for module in make()]
        (first, _), (second, _) = ready
        inputs = batch(strategy.global_rank)
        for _ in range(MICROS):
            denominator = inputs.numel() if divided else None
            strategy.backward(reduce(second(first(inputs))), second, denominator=denominator)
        gradients = [strategy.module_gradients(module) for module, _ in ready]
        return gradients, [strategy.clip_gradients_norm(*each, 1e9).item() for each in ready]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("name", "ranks"), [("single", 1), ("ddp", 2)])
def test_every_module_a_loss_runs_through_gets_the_gradients_of_plain_pytorch(
    worlds: Any, name: str, ranks: int, loss: str
) -> None:
    _, reduce, divided, bound = LOSSES[loss]
    truth = make()
    count = MICROS * sum(batch(rank).numel() for rank in range(ranks)) if divided else ranks
    for rank in range(ranks):
        (MICROS * reduce(truth[1](truth[0](batch(rank)))) / count).backward()
    norms = [torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]).item() for module in truth]
    found = worlds(ranks).run(through_two, name, loss)
    for gradients, module in zip(found[0][0], truth, strict=True):
        expected = {key: parameter.grad for key, parameter in module.named_parameters()}
        oracle.assert_same_weights(gradients, expected, bound, elementwise=True)
    for _, mine in found:
        assert mine == pytest.approx(norms, rel=bound)


def test_gradients_that_another_loss_left_behind_are_thrown_away_with_their_denominator() -> None:
    generator, judge = make()
    truth = copy.deepcopy(judge)
    truth(batch(0)).square().mean().backward()
    with get_strategy("single") as strategy:
        (generator, _), (judge, optimizer) = set_up(strategy, generator), set_up(strategy, judge)
        strategy.backward(judge(generator(batch(0))).square().sum(), generator, denominator=1000)
        optimizer.zero_grad()
        strategy.backward(judge(batch(0)).square().sum(), judge, denominator=24)
        found = strategy.module_gradients(judge)
    oracle.assert_same_weights(found, {key: p.grad for key, p in truth.named_parameters()}, 1e-6)


def test_a_loss_without_a_denominator_through_a_module_that_has_one_is_refused() -> None:
    with get_strategy("single") as strategy:
        (first, _), (second, _) = (set_up(strategy, module) for module in make())
        strategy.backward(first(batch(0)).sum(), first, denominator=24)
        strategy.backward(second(batch(0)).mean(), second)
        with pytest.raises(InvalidOption, match="some micro-batches of this step have a denominator and some"):
            strategy.backward(second(first(batch(0))).mean(), second)


def test_no_graph_is_searched_where_gradients_need_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    monkeypatch.setattr(step, "reached_by", lambda loss, modules: searched.append(len(modules)) or [False])
    with get_strategy("single") as strategy:
        (first, _), (second, optimizer) = (set_up(strategy, module) for module in make())
        strategy.backward(second(first(batch(0))).mean(), second)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
        assert searched == []
        strategy.backward(second(first(batch(0))).sum(), second, denominator=24)
        assert searched == [1]


def _frozen(first: nn.Module, second: nn.Module) -> torch.Tensor:
    return second(first.requires_grad_(False)(batch(0)))


GRAPHS: dict[str, tuple[Callable[[nn.Module, nn.Module], torch.Tensor], list[bool]]] = {
    "both": (lambda first, second: second(first(batch(0))), [True, True]),
    "detached": (lambda first, second: second(first(batch(0)).detach()), [False, True]),
    "frozen": (_frozen, [False, True]),
    "one parameter": (lambda first, second: first[2].bias * 2, [True, False]),
    "recomputed": (lambda first, second: second(checkpoint(first, batch(0), use_reentrant=False)), [True, True]),
    "neither": (lambda first, second: torch.ones(1, requires_grad=True) * 2, [False, False]),
    "a leaf": (lambda first, second: torch.ones(1, requires_grad=True), [False, False]),
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_modules_are_found_by_the_parameters_that_would_get_gradients(graph: str) -> None:
    make_loss, expected = GRAPHS[graph]
    modules = make()
    assert reached_by(make_loss(*modules), modules) == expected


def test_a_parameter_of_two_modules_is_found_in_both() -> None:
    first, second = make()
    shared = nn.Sequential(first[0], nn.Linear(8, 1))
    assert reached_by(first(batch(0)), [first, second, shared]) == [True, False, True]
