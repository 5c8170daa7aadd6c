"""What forwards write to weights counts, in every way in which it is written and wherever shards are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.testing import oracle

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "root": ("fsdp", {}),
    "units": ("fsdp", {"unit_bytes": 1}),
    "joined": ("fsdp", {"unit_bytes": 240}),
    "kept": ("fsdp", {"unit_bytes": 1, "reshard_after_forward": False}),
    "copies": ("hsdp", {"data_parallel_size": 2}),
    "offloaded": ("fsdp_cpu_offload", {"unit_bytes": 1}),
    "rounded": ("fsdp", {"unit_bytes": 1, "precision": "bf16-mixed"}),
    "tp": ("tp", {"tensor_parallel_size": 1, "plan": {}}),
}
WAYS = ["counted", "assigned", "data", "none"]


class Layer(nn.Module):
    """Smooths its weight, of five rows on two ranks, in each forward."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight, self.fast = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.way == "counted":
                self.weight.mul_(0.9).add_(self.fast, alpha=0.1)
            elif self.way == "assigned":
                self.weight.data = self.weight.data * 0.9 + self.fast.data * 0.1
            elif self.way == "data":
                self.weight.data.mul_(0.9).add_(self.fast.data, alpha=0.1)
        return torch.tanh(x @ self.weight) * self.fast


def build(way: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(*(Layer(way) for _ in range(4)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches() -> list[torch.Tensor]:
    return [torch.linspace(-1, number, 40).reshape(8, 5).sin() for number in range(1, 4)]


def train(layout: str, way: str) -> dict[str, torch.Tensor]:
    name, options = LAYOUTS[layout]
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        model, optimizer = build(way)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        for x in batches():
            with torch.no_grad():
                model(x)
            strategy.backward(model(x.tensor_split(2)[strategy.global_rank]).square().mean(), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


def plainly(way: str, rounded: bool) -> dict[str, torch.Tensor]:
    model, optimizer = build(way)
    for x in batches():
        # Whole batches: each rank's forward writes to its own copy, all of them once.
        with torch.autocast("cpu", torch.bfloat16, enabled=rounded), torch.no_grad():
            model(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
            outputs = model(x)
        outputs.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_forwards_write_counts(worlds: Any, layout: str, way: str) -> None:
    expected = plainly(way, layout == "rounded")
    for weights in worlds(2).run(train, layout, way):
        oracle.assert_same_weights(weights, expected, 2e-2 if layout == "rounded" else 1e-5)


def change_by_hand(layout: str, way: str) -> dict[str, torch.Tensor]:
    name, options = LAYOUTS[layout]
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        model, optimizer = build(way)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        for x in batches():
            loss = model(x.tensor_split(2)[strategy.global_rank]).square().mean()
            with torch.no_grad():
                next(model.parameters()).mul_(0.5)
            strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["root", "kept"])
def test_a_change_by_hand_between_a_forward_and_its_backward_lasts(worlds: Any, layout: str, way: str) -> None:
    model, optimizer = build(way)
    for x in batches():
        loss = model(x).square().mean()
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)  # the backward does not read it
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in worlds(2).run(change_by_hand, layout, way):
        oracle.assert_same_weights(weights, model.state_dict(), 1e-5)


class Block(nn.Module):
    """Holds a layer, which is no unit of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.scale = Layer(way), nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


class Encoder(nn.Module):
    """Has a method that calls what is inside units, and inside the root's."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.stem = Layer(way)
        self.blocks = nn.ModuleList(Block(way) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block.inner(x)
        return x


def build_encoder(way: str) -> tuple[Encoder, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Encoder(way)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def encode(layout: str, way: str, learning: bool) -> dict[str, torch.Tensor]:
    name, options = LAYOUTS[layout]
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        model: Any
        model, optimizer = build_encoder(way)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        for x in batches():
            x = x.tensor_split(2)[strategy.global_rank]
            if learning:
                strategy.backward(model.encode(x).square().mean(), model)
            else:
                with torch.no_grad():
                    model.encode(x)
                strategy.backward(model(x).square().mean(), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


@pytest.mark.parametrize("learning", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["root", "units", "joined", "kept"])
def test_what_is_written_in_calls_from_methods_counts(worlds: Any, layout: str, way: str, learning: bool) -> None:
    model, optimizer = build_encoder(way)
    for x in batches():
        if learning:
            model.encode(x).square().mean().backward()
        else:
            with torch.no_grad():
                model.encode(x)
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in worlds(2).run(encode, layout, way, learning):
        oracle.assert_same_weights(weights, model.state_dict(), 1e-5)


def change_held(layout: str, way: str) -> bool:
    name, options = LAYOUTS[layout]
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        model: Any = strategy.setup_module(build_encoder(way)[0])
        held, x = list(model.parameters()), batches()[0]
        with torch.no_grad():
            model.stem(x)
            held[0].mul_(0.5)
            model.blocks[0].inner(x)
        plain = build_encoder(way)[0]
        plain.stem(x)
        return torch.allclose(dict(strategy.full_parameters(model))["stem.weight"], plain.stem.weight * 0.5)


@pytest.mark.parametrize("way", WAYS)
def test_a_change_by_hand_between_calls_from_methods_lasts(worlds: Any, way: str) -> None:
    assert worlds(2).run(change_held, "root", way) == [True, True]
