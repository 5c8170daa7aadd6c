"""What a forward writes to weights once more, while activation checkpointing runs it again in backward, counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shard_core import get_strategy
from shard_core.testing import models, oracle, set_up, whole_weights

_STEPS, _BATCH = 3, 12
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("fsdp", {}),
    ("fsdp", {"unit_bytes": 1}),
    ("fsdp", {"reshard_after_forward": False}),
    ("hsdp", {"unit_bytes": 1}),
    ("fsdp_cpu_offload", {}),
]


def halve(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def halve_uncounted(weight: torch.Tensor) -> None:
    weight.data.mul_(0.5)


class Writing(nn.Linear):
    """A layer that writes to its weight first."""

    write: Callable[[torch.Tensor], None]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.write(self.weight)
        return torch.tanh(super().forward(inputs))


class Checkpointed(nn.Module):
    """A layer that is run again in backward, and a function that calls another and writes to it."""

    def __init__(self, write: Callable[[torch.Tensor], None], again: bool, reentrant: bool, frozen: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = Writing(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)
        self.first.write = self.write = write
        self.again, self.reentrant = again, reentrant
        self.first.weight.requires_grad_(not frozen)
        self.second.weight.requires_grad_(not frozen)

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        self.write(self.second.weight)
        return torch.sigmoid(self.second(inputs))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = inputs.requires_grad_()
        for part in (self.first, self.run):
            hidden = checkpoint(part, hidden, use_reentrant=self.reentrant) if self.again else part(hidden)
        return nn.functional.mse_loss(self.third(hidden), targets)


#: Units inside of what writes to them, of which torch gathers one ahead in backward.
INNER = {"auto_wrap_policy": {nn.Linear}}


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def plain(*how: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Checkpointed(*how)
    optimizer = sgd(model)
    for batch in models.batches("plain", _STEPS, _BATCH):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def trained(name: str, options: dict[str, Any], *how: Any) -> dict[str, torch.Tensor]:
    with get_strategy(name, **options) as strategy:
        model, optimizer = set_up(strategy, lambda: Checkpointed(*how), sgd)
        for batch in models.batches("plain", _STEPS, _BATCH):
            strategy.backward(model(*models.share_of(strategy, batch)), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return whole_weights(strategy, model)


@pytest.mark.parametrize(("name", "options"), LAYOUTS)
@pytest.mark.parametrize(
    ("write", "reentrant", "frozen"),
    [(halve, False, False), (halve, True, False), (halve, False, True), (halve_uncounted, False, False)],
)
def test_they_count(worlds: Any, name: str, options: dict[str, Any], write: Any, reentrant: bool, frozen: bool) -> None:
    how = (write, True, reentrant, frozen)
    expected = plain(*how)
    once = plain(write, False, reentrant, frozen)
    assert not torch.allclose(expected["second.weight"], once["second.weight"])
    for weights in worlds(2).run(trained, name, options, *how):
        oracle.assert_same_weights(weights, expected, 1e-5)


@pytest.mark.parametrize(
    ("name", "more"), [("fsdp", {}), ("fsdp", {"backward_prefetch": 2}), ("hsdp", {}), ("fsdp_cpu_offload", {})]
)
@pytest.mark.parametrize(("reentrant", "frozen"), [(False, False), (True, False), (False, True)])
def test_those_to_units_that_are_gathered_ahead_count(
    worlds: Any, name: str, more: dict[str, Any], reentrant: bool, frozen: bool
) -> None:
    how = (halve, True, reentrant, frozen)
    for weights in worlds(2).run(trained, name, {**INNER, **more}, *how):
        oracle.assert_same_weights(weights, plain(*how), 1e-5)


def edited(name: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Halve a weight by hand between a forward and its backward, and return what is left of it."""
    with get_strategy(name, **options) as strategy:
        model, optimizer = set_up(strategy, lambda: Checkpointed(halve_uncounted, False, False, False), sgd)
        batch = models.share_of(strategy, models.batches("plain", 1, _BATCH)[0])
        for _ in range(2):
            loss = model(*batch)
            model.second.weight.data.mul_(0.5)
            strategy.backward(loss, model)
            optimizer.zero_grad()
        return whole_weights(strategy, model)


@pytest.mark.parametrize(("name", "options"), LAYOUTS[:2])
def test_what_was_changed_by_hand_after_the_forward_stays(worlds: Any, name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    expected = Checkpointed(halve, False, False, False).second.weight.detach() * 0.5**4
    for weights in worlds(2).run(edited, name, options):
        torch.testing.assert_close(weights["second.weight"], expected)


class Block(nn.Module):
    """A unit that is frozen, and writes to what it computes with; some run what computes again themselves."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layer, self.inside = nn.Linear(6, 6).requires_grad_(False), inside

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, inputs, use_reentrant=False) if self.inside else self.run(inputs)

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        halve(self.layer.weight)
        return inputs + torch.tanh(self.layer(inputs))


class Blocks(nn.Module):
    """Frozen units that are run again in backward, which ends before they do, and a layer below them."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList(Block(inside) for _ in range(2))
        self.scale, self.inside = nn.Parameter(torch.ones(6), requires_grad=False), inside

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden) if self.inside else checkpoint(block, hidden, use_reentrant=False)
        return checkpoint(self.scaled, hidden, use_reentrant=False).square().mean()

    def scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        halve(self.scale)
        return torch.sin(hidden * self.scale)


def frozen_units(name: str, options: dict[str, Any], inside: bool) -> dict[str, torch.Tensor]:
    with get_strategy(name, **options) as strategy:
        model, optimizer = set_up(strategy, lambda: Blocks(inside), sgd)
        for inputs, _ in models.batches("plain", _STEPS, _BATCH):
            strategy.backward(model(models.share_of(strategy, (inputs, inputs))[0]), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return whole_weights(strategy, model)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("name", "options"), [LAYOUTS[0], LAYOUTS[1], LAYOUTS[3]])
def test_those_of_units_without_a_gradient_count(worlds: Any, name: str, options: dict[str, Any], inside: bool) -> None:
    torch.manual_seed(0)
    model = Blocks(inside)
    optimizer = sgd(model)
    for inputs, _ in models.batches("plain", _STEPS, _BATCH):
        model(inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in worlds(2).run(frozen_units, name, options, inside):
        oracle.assert_same_weights(weights, model.state_dict(), 1e-5)
