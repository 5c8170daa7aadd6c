"""Parameters that are exchanged or resized after setup are refused by name, before anything computes with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from words import WORDS, Words, refused_step, sgd

from shard_core import get_strategy
from shard_core.testing import oracle, set_up


def resize(model: Any) -> None:
    """Do as transformers' ``resize_token_embeddings`` does."""
    model.embed.weight.data = torch.ones(8, 4)


def exchange_parameter(model: Any) -> None:
    model.embed.weight = nn.Parameter(torch.ones(8, 4))


def exchange_layer(model: Any) -> None:
    model.embed = nn.Embedding(8, 4)


def exchange_for_its_like(model: Any) -> None:
    model.embed = nn.Embedding(6, 4)


HANDS = {each.__name__: each for each in (resize, exchange_parameter, exchange_layer, exchange_for_its_like)}


def changed(hand: str, when: str, options: dict[str, Any]) -> tuple[str, str]:
    """Change a module at some time of a step; return when that was refused, and how."""
    with get_strategy(accelerator="cpu", **options) as strategy:
        model, optimizer = set_up(strategy, Words, sgd)
        strategy.backward(model(WORDS).square().mean(), model)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
        return refused_step(strategy, model, optimizer, HANDS[hand], when)


@pytest.mark.parametrize("hand", HANDS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_exchanged_is_refused(worlds: Any, stage: int, hand: str) -> None:
    for at, message in worlds(2).run(changed, hand, "forward", {"name": "deepspeed", "stage": stage}):
        assert at in ("forward", "backward")
        assert message.startswith("'embed.weight' "), message
        assert "resize" in message or "was put into the module after setup" in message, message
        if hand == "resize":
            assert message.startswith("'embed.weight' has the shape (8, 4) and had (6, 4) at setup"), message


OPTIONS: list[dict[str, Any]] = [
    {"name": "deepspeed", "stage": 0},
    {"name": "deepspeed_stage_1"},
    {"name": "deepspeed_stage_3"},
    {"name": "deepspeed_stage_3", "param_persistence_threshold": 0},
]


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_resized_is_refused_before_anything_computes_with_it(
    worlds: Any, options: dict[str, Any], when: str
) -> None:
    for at, message in worlds(2).run(changed, "resize", when, options):
        assert at == when
        assert message.startswith("'embed.weight' has the shape (8, 4) and had (6, 4) at setup"), message


def tied_later(stage: int) -> dict[str, torch.Tensor]:
    """Put one of the module's own parameters in another's place, and freeze and exchange a layer."""
    with get_strategy("deepspeed", stage=stage) as strategy:
        model, optimizer = set_up(strategy, Words, sgd)
        change_and_train(model, optimizer, lambda loss: strategy.backward(loss, model))
        return strategy.module_state_dict(model)


def change_and_train(model: Any, optimizer: torch.optim.Optimizer, backward: Any) -> None:
    model.head.weight = model.embed.weight
    model.first = nn.Linear(4, 4).requires_grad_(False)
    nn.init.eye_(model.first.weight)
    nn.init.zeros_(model.first.bias)
    for _ in range(2):
        backward(model(WORDS).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 1])
def test_what_is_tied_or_exchanged_for_what_is_frozen_trains(worlds: Any, stage: int) -> None:
    torch.manual_seed(0)
    plain = Words()
    change_and_train(plain, sgd(plain), torch.Tensor.backward)
    oracle.assert_same_weights(worlds(2).run(tied_later, stage)[0], plain.state_dict(), 1e-6)


def set_up_again(stage: int) -> bool:
    with get_strategy("deepspeed", stage=stage) as strategy:
        model, _ = set_up(strategy, Words, sgd)
        own = strategy.unwrap(model)
    resize(own)
    with get_strategy("deepspeed", stage=stage) as strategy:
        optimizer = sgd(own)
        model, (optimizer,) = strategy.setup_module_and_optimizers(own, [optimizer])
        strategy.backward(model(torch.tensor([[7]])).square().mean(), model)
        strategy.optimizer_step(optimizer)
        weights = strategy.broadcast(strategy.module_state_dict(model))
        return [bool((row != 1).any()) for row in weights["embed.weight"]] == [False] * 7 + [True]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_resized_can_be_set_up_again(worlds: Any, stage: int) -> None:
    assert all(worlds(2).run(set_up_again, stage))
