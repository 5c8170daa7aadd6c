"""What one forward has gathered is not what a later one computes with, once weights have changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy


class Model(nn.Module):
    """Holds parameters of its own, of a block, and of a layer that methods call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.block = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.block(x)) * self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(x).square().mean()


def _with_gradients(model: Any, x: torch.Tensor) -> None:
    model(x)


def _method_with_gradients(model: Any, x: torch.Tensor) -> None:
    model.score(x)


def _without(context: Callable[[], contextlib.AbstractContextManager[Any]], name: str) -> Any:
    def look(model: Any, x: torch.Tensor) -> None:
        with context():
            model(x) if name == "forward" else getattr(model, name)(x)

    return look


LOOKS = {
    "forward with gradients": _with_gradients,
    "a method with gradients": _method_with_gradients,
    "forward": _without(torch.no_grad, "forward"),
    "forward in inference mode": _without(torch.inference_mode, "forward"),
    "a method": _without(torch.no_grad, "score"),
    "a method in inference mode": _without(torch.inference_mode, "score"),
    "a submodule": _without(torch.no_grad, "block"),
}


def edit(model: nn.Module, optimizer: torch.optim.Optimizer, by_hand: str) -> None:
    """Change weights by hand: those that the module lists, or those that the optimizer has, or what is their data."""
    listed = model.parameters() if by_hand == "module" else optimizer.param_groups[0]["params"]
    with torch.no_grad():
        for parameter in listed:
            (parameter.data if by_hand == "data" else parameter).mul_(0.9)


def losses(
    strategy: Any, model: Any, optimizer: torch.optim.Optimizer, shares: list[torch.Tensor], look: str, by_hand: str
) -> list[float]:
    """Train, with a look at the model before weights change: by a step, or by hand as well."""
    found = []
    for x in shares:
        loss = model(x)
        strategy.backward(loss, model)
        LOOKS[look](model, x)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
        found.append(loss.item())
        if by_hand:
            LOOKS[look](model, x)
            edit(model, optimizer, by_hand)
    return found


def build() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def batches() -> list[torch.Tensor]:
    return [torch.linspace(-1, number, 16).reshape(4, 4) for number in range(1, 4)]


def train(options: dict[str, Any], look: str, by_hand: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    with get_strategy("fsdp", **options) as strategy:
        model, optimizer = build()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        shares = [x.tensor_split(strategy.world_size)[strategy.global_rank] for x in batches()]
        found = losses(strategy, model, optimizer, shares, look, by_hand)
        return found, {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


def plainly(by_hand: str) -> tuple[Model, list[float]]:
    model, optimizer = build()
    found = []
    for x in batches():
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        if by_hand:
            edit(model, optimizer, by_hand)
    return model, found


@pytest.mark.parametrize("options", [{}, {"unit_bytes": 1, "reshard_after_forward": False}], ids=["root", "units"])
@pytest.mark.parametrize(
    ("look", "by_hand"),
    [
        *((name, "") for name in LOOKS),
        *((name, "module") for name in ("forward", "forward in inference mode")),
        *((name, "groups") for name in LOOKS),
        *((name, "data") for name in ("forward", "forward with gradients", "a submodule")),
    ],
)
def test_weights_that_change_after_a_look_are_what_trains(
    worlds: Any, options: dict[str, Any], look: str, by_hand: str
) -> None:
    plain, expected = plainly(by_hand)
    runs = worlds(2).run(train, options, look, by_hand)
    mean = [sum(each) / 2 for each in zip(*(found for found, _ in runs), strict=True)]
    assert mean == pytest.approx(expected, rel=1e-6)
    for _, weights in runs:
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-6, atol=1e-7, msg=name)


def between(options: dict[str, Any], change: str) -> dict[str, torch.Tensor]:
    """Change something by hand between a forward and its backward."""
    with get_strategy("fsdp", **options) as strategy:
        model, optimizer = build()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        shares = [x.tensor_split(strategy.world_size)[strategy.global_rank] for x in batches()]
        strategy.backward(model(shares[0]), model)
        loss = model(shares[1])
        CHANGES[change](model)
        strategy.backward(loss, model)
        strategy.optimizer_step(optimizer)
        return {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


def _halve(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


CHANGES: dict[str, Callable[[Any], None]] = {
    "zero": lambda model: model.zero_grad(),
    "zero in place": lambda model: model.zero_grad(set_to_none=False),
    "zero a layer": lambda model: model.head.zero_grad(),
    "halve": _halve,
}


@pytest.mark.parametrize("options", [{}, {"unit_bytes": 1}], ids=["root", "units"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_between_forward_and_backward_is_changed(
    worlds: Any, change: str, options: dict[str, Any]
) -> None:
    model, optimizer = build()
    model(batches()[0]).backward()
    loss = model(batches()[1])
    CHANGES[change](model)
    loss.backward()
    optimizer.step()
    for weights in worlds(2).run(between, options, change):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
