"""Which ranks of a tensor-parallel group draw which masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shard_core import get_strategy

Masks = list[torch.Tensor]


def masks(again: bool) -> tuple[Masks, Masks]:
    """Train torch's own layer twice; give the masks on its split activations, and those on its whole ones."""
    with get_strategy("tp", tensor_parallel_size=2) as strategy:
        strategy.seed_everything(0)
        layer = nn.TransformerEncoderLayer(8, 2, 64, 0.5, batch_first=True)
        inputs = torch.randn(2, 4, 8)
        layer = strategy.setup_module(layer)
        found: dict[nn.Module, Masks] = {layer.dropout: [], layer.dropout2: []}

        def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            found[module].append(output == 0)

        for module in found:
            module.register_forward_hook(note)
        for _ in range(2):
            output = checkpoint(layer, inputs, use_reentrant=False) if again else layer(inputs)
            strategy.backward(output.square().mean(), layer)
        return found[layer.dropout], found[layer.dropout2]


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one == other).float().mean() > 0.9)


def test_masks_differ_on_split_activations_and_are_alike_on_whole_ones(worlds: Any) -> None:
    (split, whole), (other_split, other_whole) = worlds(2).run(masks, False)
    assert len(split) == len(whole) == 2
    for one, other in zip(split, other_split, strict=True):
        assert one.shape == (2, 4, 32)
        assert not alike(one, other)
    assert all(torch.equal(one, other) for one, other in zip(whole, other_whole, strict=True))
    assert not alike(*split)
    assert not alike(*whole)


def test_activations_that_are_computed_again_get_the_masks_they_had(worlds: Any) -> None:
    for split, _ in worlds(2).run(masks, True):
        first, first_again, second, second_again = split
        assert torch.equal(first, first_again)
        assert torch.equal(second, second_again)
        assert not alike(first, second)
