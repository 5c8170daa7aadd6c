"""What options change about layers lasts as long as the strategy that was given them."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import InvalidOption, get_strategy
from shard_core._versions import is_compiled


class Block(nn.Linear):
    """Counts how often it runs."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def stack() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


def exchanged(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if "forward" in vars(part)]


def calls_of_a_step(model: nn.Sequential, **options: Any) -> list[int]:
    """Run forward and backward once; return how often each block ran."""
    for block in model:
        block.calls = 0
    with get_strategy("single", accelerator="cpu", **options) as strategy:
        strategy.setup_module(model)
        strategy.backward(model(torch.ones(1, 2, requires_grad=True)).sum(), model)
        model.zero_grad()
    return [block.calls for block in model]


@pytest.mark.parametrize("more", [{}, {"activation_offload": True}, {"activation_offload": Block}])
def test_layers_compute_again_once_however_often_a_module_is_set_up(more: dict[str, Any]) -> None:
    model = stack()
    assert calls_of_a_step(model, activation_checkpointing=Block, **more) == [2, 2]
    assert calls_of_a_step(model, activation_checkpointing=Block, **more) == [2, 2]
    assert calls_of_a_step(model) == [1, 1]
    assert not exchanged(model)


@pytest.mark.parametrize("more", [{}, {"activation_offload": Block}, {"activation_checkpointing": Block}])
def test_what_was_compiled_is_as_before_after_teardown(more: dict[str, Any]) -> None:
    model = stack()
    for _ in range(2):
        with get_strategy("single", accelerator="cpu", compile={"backend": "eager"}, **more) as strategy:
            strategy.setup_module(model)
            assert is_compiled(model) or exchanged(model)
        assert not is_compiled(model)
        assert not exchanged(model)


def test_a_setup_that_is_refused_leaves_layers_as_they_were() -> None:
    model = stack()
    options: dict[str, Any] = {"activation_checkpointing": Block, "activation_offload": lambda part: False}
    with get_strategy("single", accelerator="cpu", **options) as strategy:
        with pytest.raises(InvalidOption, match="activation_offload is a function that chooses none"):
            strategy.setup_module(model)
        assert not exchanged(model)


def test_forwards_of_the_user_s_own_stay() -> None:
    model = stack()
    before, after = (MethodType(lambda block, x: x, block) for block in model)
    model[0].forward = before
    with get_strategy("single", accelerator="cpu", activation_checkpointing=Block) as strategy:
        strategy.setup_module(model)
        assert model[0].forward is not before
        model[1].forward = after
    assert [block.forward for block in model] == [before, after]
    assert all(vars(block)["forward"] is own for block, own in zip(model, (before, after), strict=True))
