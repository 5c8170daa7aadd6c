"""Whatever a forward returns, what it was computed from trains, or a sentence says why not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import oracle


class Output:
    """An object of a user's own, with tensors for attributes, some of them deeper."""

    def __init__(self, prediction: torch.Tensor, **more: Any) -> None:
        self.prediction = prediction
        self.more = more
        self.me = self


class Model(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self._form = form
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        prediction = self.second(hidden)
        self.kept[:] = [prediction]
        return {
            "object": Output(prediction),
            "objects in objects": {"out": Output(x, deeper=Output(prediction))},
            "beside a tensor": (hidden.detach(), Output(prediction)),
            "nothing": None,
        }[self._form]


class Block(nn.Module):
    """Hands on an object that torch cannot open."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(torch.tanh(self.layer(x)))


class Chain(nn.Module):
    """Blocks that hand on objects to one another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).prediction
        self.kept[:] = [x]
        return x


def trained(form: str, compiled: bool = False, **options: Any) -> dict[str, torch.Tensor] | str:
    """Train two steps on what the forward has kept; return the weights or the refusal."""
    with get_strategy("fsdp", **options) as strategy:
        model = MODELS[form]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        if compiled:
            model.compile(backend="aot_eager")
        for step in range(2):
            model(data(step, strategy.global_rank))
            (prediction,) = strategy.unwrap(model).kept
            try:
                strategy.backward(prediction.square().mean(), model)
            except SetupError as error:
                return str(error)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return strategy.module_state_dict(model)


def data(step: int, rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 6).reshape(2, 3) * (1 + step + rank)


FORMS = ("object", "objects in objects", "beside a tensor", "nothing")
MODELS: dict[str, Callable[[], Any]] = {form: functools.partial(Model, form) for form in FORMS} | {"chain": Chain}


@pytest.mark.parametrize("form", ["object", "objects in objects", "beside a tensor", "chain"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("unit_bytes", [1, 1 << 20])
def test_what_objects_hold_is_trained_through(worlds: Any, form: str, compiled: bool, unit_bytes: int) -> None:
    trains = functools.partial(trained, reshard_after_forward=True, unit_bytes=unit_bytes)
    plain = MODELS[form]()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(2):
        for rank in range(2):
            plain(data(step, rank))
            (plain.kept[0].square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    oracle.assert_same_weights(worlds(2).run(trains, form, compiled)[0], plain.state_dict(), 1e-6)


def test_what_no_output_holds_is_refused(worlds: Any) -> None:
    for message in worlds(2).run(trained, "nothing"):
        assert message.startswith("the loss came through Model, but not through what its forward has returned")
