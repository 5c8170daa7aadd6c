"""Activation checkpointing: less is kept, more is computed, and nothing else changes."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import InvalidOption, get_strategy

WIDTH = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        hidden = torch.nn.functional.gelu(self.up(x))
        return x + self.dropout(self.down(hidden)) * scale


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x.square().mean()


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, Layer)


@contextmanager
def counted_bytes(kept: list[int]) -> Iterator[None]:
    """Add up what autograd keeps for backward, without parameters."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.shape[:1] == (64,):
            kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def step(options: dict[str, Any]) -> Any:
    """Train two steps; give losses, weights, calls of each layer and bytes kept for a backward."""
    with get_strategy("fsdp", **options) as strategy:
        strategy.seed_everything(5)
        with strategy.module_init_context():
            model = Stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        losses, kept = [], []
        for _ in range(2):
            kept = []
            with counted_bytes(kept):
                loss = model(torch.ones(64, WIDTH))
            strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(loss.item())
        weights = {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}
        return losses, weights, [layer.calls for layer in model.layers], sum(kept)


@pytest.mark.parametrize(
    ("layers", "units"),
    [
        (Layer, {"unit_bytes": 2**30}),
        ([Layer], {"unit_bytes": 1}),
        (is_layer, {"auto_wrap_policy": {nn.Linear}}),
    ],
)
def test_activations_are_computed_again_to_the_bit(worlds: Any, layers: Any, units: dict[str, Any]) -> None:
    plain = worlds(2).run(step, units)
    again = worlds(2).run(step, {**units, "activation_checkpointing": layers})
    for (losses, weights, calls, kept), (truth, true_weights, true_calls, true_kept) in zip(again, plain, strict=True):
        assert losses == truth, "dropout draws the same mask again"
        assert weights.keys() == true_weights.keys(), "nothing is wrapped"
        assert all(torch.equal(weights[name], tensor) for name, tensor in true_weights.items())
        assert (calls, true_calls) == ([4] * 4, [2] * 4)
        assert kept <= 64 * WIDTH * 4 * 6 < true_kept / 5, "an input per layer, and what the loss needs"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("Layer", "activation_checkpointing is 'Layer'; give a class of modules"),
        (["Layer"], "activation_checkpointing names 'Layer'; name classes of modules"),
        ([], "activation_checkpointing is \\[\\]"),
        (isinstance, "activation_checkpointing is called as function\\(module\\), but isinstance.*missing"),
    ],
)
def test_what_is_no_layer_gets_a_sentence(layers: Any, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        get_strategy("fsdp", activation_checkpointing=layers)


def test_a_class_that_is_not_there_gets_a_sentence() -> None:
    options = {"activation_checkpointing": nn.TransformerEncoderLayer}
    message = "activation_checkpointing names TransformerEncoderLayer, of which the model has none"
    with get_strategy("fsdp", **options) as strategy, pytest.raises(InvalidOption, match=message):
        strategy.setup_module(Stack())


def doubled(forward: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return 2 * forward(x, **kwargs)


def test_a_forward_that_somebody_exchanged_before_stays_and_runs_again() -> None:
    with get_strategy("fsdp", activation_checkpointing=Layer) as strategy:
        model = Stack()
        first = model.layers[0]
        first.forward = functools.partial(doubled, first.forward)
        before = first(torch.ones(2, WIDTH), scale=0.0)
        model = strategy.setup_module(model)
        after = model.layers[0](torch.ones(2, WIDTH), scale=0.0)
        after.sum().backward()
        assert torch.equal(before, after)
        assert first.calls == 3
