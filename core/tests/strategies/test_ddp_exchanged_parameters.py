"""Parameters that are resized or exchanged after setup, of which torch's wrapper knows nothing, are refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import set_up


def build() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2))


def resize(model: Any) -> None:
    model[0].weight.data = torch.ones(8, 4)  # as transformers' resize_token_embeddings


def exchange_parameter(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.ones(8, 4))


def exchange_layer(model: Any) -> None:
    model[0] = nn.Embedding(6, 4)


HANDS: dict[str, Callable[[Any], None]] = {each.__name__: each for each in (resize, exchange_parameter, exchange_layer)}


def changed(hand: str, when: str, options: dict[str, Any]) -> str:
    """Change a module before a forward, its backward or the step; return the refusal."""
    words = torch.tensor([[1, 2, 3]])
    with get_strategy("ddp", **options) as strategy:
        model, optimizer = set_up(strategy, build, "adamw")
        strategy.backward(model(words).square().mean(), model)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
        own = strategy.unwrap(model)
        try:
            if when == "forward":
                HANDS[hand](own)
            loss = model(words).square().mean()
            if when == "backward":
                HANDS[hand](own)
            strategy.backward(loss, model)
            if when == "step":
                HANDS[hand](own)
            strategy.optimizer_step(optimizer)
        except SetupError as error:
            return str(error)
        return "stepped"


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["default", "unused"])
@pytest.mark.parametrize("when", ["forward", "backward", "step"])
def test_what_is_resized_is_refused(worlds: Any, when: str, options: dict[str, Any]) -> None:
    for message in worlds(2).run(changed, "resize", when, options):
        assert message.startswith("'0.weight' has the shape (8, 4) and had (6, 4) at setup"), message


@pytest.mark.parametrize("hand", ["exchange_parameter", "exchange_layer"])
def test_what_is_exchanged_is_refused(worlds: Any, hand: str) -> None:
    what = {
        "exchange_parameter": "has the shape (8, 4) and had (6, 4) at setup",
        "exchange_layer": "is another parameter",
    }
    for message in worlds(2).run(changed, hand, "forward", {}):
        assert message.startswith(f"'0.weight' {what[hand]}"), message
