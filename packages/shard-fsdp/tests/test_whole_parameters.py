"""What is whole on every rank is averaged, though deferred micro-batches alone or one rank's have reached it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shard_core import get_strategy
from shard_core.testing import oracle


class Gated(nn.Module):
    """Uses one of its layers only where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, gated: bool) -> torch.Tensor:
        x = self.body(x)
        return (self.head(x) * self.scale if gated else x).square().mean()


#: In which of a step's three micro-batches, the last of which is sent, which rank uses the layer.
WHERE: dict[str, Callable[[int, int], bool]] = {
    "in a deferred one": lambda micro, rank: micro == 0,
    "on one rank": lambda micro, rank: micro == 0 and rank == 1,
    "elsewhere in the last": lambda micro, rank: micro == (0 if rank else 2),
    "in the last": lambda micro, rank: micro == 2,
    "never": lambda micro, rank: False,
}
#: How many ranks, which strategy, and where: what is sharded must be used on all ranks alike.
RUNS: dict[str, tuple[int, str, dict[str, Any], list[str]]] = {
    "fsdp": (2, "fsdp", {}, ["in a deferred one", "in the last", "never"]),
    "fsdp, head whole": (3, "fsdp", {"ignored_modules": ["head"], "unit_bytes": 1}, list(WHERE)),
    "hsdp, head whole": (3, "hsdp", {"device_mesh": (3, 1), "ignored_states": ["head.*"]}, list(WHERE)),
    "offloaded": (2, "fsdp_cpu_offload", {"ignored_modules": ["head"]}, list(WHERE)),
}
STEPS, MICROS = 2, 3


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1 + step + micro, 8).view(2, 4) * (1 + rank)


def trained(name: str, options: dict[str, Any], places: list[str]) -> list[Any]:
    """Return for each place the losses and norms of all steps, and the weights at the end."""
    return [trained_once(name, options, where) for where in places]


def trained_once(name: str, options: dict[str, Any], where: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    with get_strategy(name, **options) as strategy:
        torch.manual_seed(0)
        model = Gated()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        numbers = []
        for step in range(STEPS):
            for micro in range(MICROS):
                with strategy.no_backward_sync(model, enabled=micro < MICROS - 1):
                    gated = WHERE[where](micro, strategy.global_rank)
                    loss = model(batch(step, micro, strategy.global_rank), gated)
                    strategy.backward(loss, model)
                numbers.append(strategy.all_reduce(loss.detach()).item())
            numbers.append(strategy.clip_gradients_norm(model, optimizer, 1.0).item())
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return numbers, {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


def plain(ranks: int, where: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train the same in one process."""
    torch.manual_seed(0)
    model = Gated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = []
    for step in range(STEPS):
        for micro in range(MICROS):
            loss = sum(model(batch(step, micro, rank), WHERE[where](micro, rank)) for rank in range(ranks)) / ranks
            loss.backward()
            numbers.append(loss.item())
        numbers.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return numbers, model.state_dict()


@pytest.mark.parametrize("run", RUNS)
def test_what_only_deferred_micro_batches_reach_is_averaged(worlds: Any, run: str) -> None:
    ranks, name, options, places = RUNS[run]
    truth = [plain(ranks, where) for where in places]
    for found in worlds(ranks).run(trained, name, options, places):
        for where, (mine, weights), (numbers, expected) in zip(places, found, truth, strict=True):
            assert mine == pytest.approx(numbers, rel=1e-5), where
            oracle.assert_same_weights(weights, expected, 1e-5, elementwise=True)


def several_modules() -> tuple[float, float | None]:
    """Go backward through another module in between; return a gradient that was deferred, and one never reached."""
    with get_strategy("fsdp") as strategy:
        torch.manual_seed(0)
        model, other = strategy.setup_module(Gated()), strategy.setup_module(Gated())
        with strategy.no_backward_sync(model):
            strategy.backward(model(batch(0, 0, strategy.global_rank), True), model)
        strategy.backward(other(batch(0, 1, strategy.global_rank), False), other)
        strategy.backward(model(batch(0, 2, strategy.global_rank), False), model)
        assert model.scale.grad is not None
        return model.scale.grad.item(), other.scale.grad


def test_another_module_in_between_changes_nothing(worlds: Any) -> None:
    torch.manual_seed(0)
    model = Gated()
    for rank in range(2):
        (model(batch(0, 0, rank), True) / 2).backward()
    assert model.scale.grad is not None
    assert worlds(2).run(several_modules) == [(pytest.approx(model.scale.grad.item(), rel=1e-5), None)] * 2


class TwoScales(nn.Module):
    """Has two parameters without dims, of which a loss reaches one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return (self.body(x) * self.scales[which]).square().mean()


def each_its_own() -> dict[str, torch.Tensor]:
    """Return the gradients where each rank reaches a scale of its own."""
    with get_strategy("fsdp") as strategy:
        torch.manual_seed(0)
        model = strategy.setup_module(TwoScales())
        strategy.backward(model(batch(0, 0, strategy.global_rank), strategy.global_rank), model)
        return strategy.module_gradients(model)


def test_ranks_may_reach_different_whole_parameters(worlds: Any) -> None:
    torch.manual_seed(0)
    model = TwoScales()
    for rank in range(2):
        (model(batch(0, 0, rank), rank) / 2).backward()
    truth = {name: parameter.grad for name, parameter in model.named_parameters()}
    oracle.assert_same_weights(worlds(2).run(each_its_own)[0], truth, 1e-5, elementwise=True)


class Turning(nn.Module):
    """Complex numbers that turn what comes in, and a real scale for each of so many channels."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.turns = nn.Parameter(torch.randn(inputs, dtype=torch.cfloat))
        self.scale = nn.Parameter(torch.randn(inputs, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.turns).imag @ self.scale


def make_turning() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a module of a unit with more complex numbers and one with more real ones."""
    torch.manual_seed(0)
    model = nn.Sequential(Turning(4, 1), nn.Tanh(), Turning(1, 5))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train_turning(optimizer: Any, backward: Callable[[int], Any], clip: Callable[[], Any]) -> list[float]:
    norms = []
    for step in range(STEPS):
        backward(step)
        norms.append(float(clip()))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def turning(name: str, options: dict[str, Any]) -> Any:
    with get_strategy(name, **options) as strategy:
        model, optimizer = make_turning()
        model, _ = strategy.setup_module_and_optimizers(model, [optimizer])
        rank = strategy.distributed_sampler_kwargs["rank"]
        norms = train_turning(
            optimizer,
            lambda step: strategy.backward(model(batch(step, 0, rank)).square().mean(), model),
            lambda: strategy.clip_gradients_norm(model, optimizer, 0.5),
        )
        whole = [name for name, each in model.named_parameters() if not isinstance(each, DTensor)]
        return whole, norms, {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


@pytest.mark.parametrize(
    ("name", "options", "whole"),
    [
        ("fsdp", {}, ["0.scale", "2.scale"]),
        ("fsdp", {"auto_wrap_policy": {Turning}}, ["0.scale", "2.turns"]),
        ("hsdp", {"device_mesh": (2, 1)}, ["0.scale", "2.scale"]),
        ("fsdp_cpu_offload", {}, ["0.scale", "2.scale"]),
    ],
)
def test_complex_parameters_train_beside_real_ones(
    worlds: Any, name: str, options: dict[str, Any], whole: list[str]
) -> None:
    model, optimizer = make_turning()
    norms = train_turning(
        optimizer,
        lambda step: torch.stack([model(batch(step, 0, rank)).square().mean() for rank in range(2)]).mean().backward(),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    )
    for kept, seen, weights in worlds(2).run(turning, name, options):
        assert kept == whole
        assert seen == pytest.approx(norms, rel=1e-5)
        oracle.assert_same_weights(weights, model.state_dict(), 1e-5)
