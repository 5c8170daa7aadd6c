"""Methods other than forward, and submodules called by hand, see whole parameters and train them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy


class Coder(nn.Module):
    """An encoder of blocks, a decoder, and methods that use them one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.ModuleList([nn.Identity()])[0])
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.decoder = nn.Linear(6, 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x)
        return x

    def reconstruct(self, x: torch.Tensor) -> torch.Tensor:
        return (self.decoder(self.encode(x)) - x).square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reconstruct(x) + self.encode(x).abs().mean()


Loss = Callable[[Any, torch.Tensor], torch.Tensor]
LOSSES: dict[str, Loss] = {
    "forward": lambda model, x: model(x),
    "a method": lambda model, x: model.reconstruct(x),
    "methods and forward": lambda model, x: model(x) + model.reconstruct(2 * x),
    "a submodule": lambda model, x: model.decoder(model.encoder(x)).square().mean(),
    "a unit": lambda model, x: model.blocks[1](torch.cat([x, x[:, :2]], 1)).square().mean(),
    "inside a unit": lambda model, x: model.blocks[2][0](model.encoder(x)).square().mean(),
}


def step(model: Any, x: torch.Tensor, order: list[str]) -> list[torch.Tensor]:
    return [LOSSES[name](model, x) for name in order]


def data(rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4) * (rank + 1)


def trained(options: dict[str, Any], order: list[str], mode: str | None) -> dict[str, torch.Tensor]:
    """Take a step for each loss in turn; return the weights."""
    with get_strategy("fsdp", **options) as strategy:
        strategy.seed_everything(0)
        with strategy.module_init_context():
            model = Coder()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        if mode is not None:
            with getattr(torch, mode)():
                model.encode(data(0))
        for name in order:
            strategy.backward(LOSSES[name](model, data(strategy.global_rank)), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


def truth(order: list[str]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Coder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name in order:
        for rank in range(2):
            (LOSSES[name](model, data(rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


ORDERS = [[name, "forward", name] for name in LOSSES]
UNITS = [
    {"unit_bytes": 200},
    {"unit_bytes": 1, "reshard_after_forward": True},
    pytest.param({}, marks=pytest.mark.long),
    pytest.param({"unit_bytes": 1}, marks=pytest.mark.long),
]


@pytest.mark.parametrize("options", UNITS)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order[0])
def test_any_way_in_gives_the_gradients_of_plain_pytorch(
    worlds: Any, options: dict[str, Any], order: list[str]
) -> None:
    expected = truth(order)
    for weights in worlds(2).run(trained, options, order, None):
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_training_goes_on_after_a_method_without_gradients(worlds: Any, mode: str) -> None:
    expected = truth(["a method"])
    for weights in worlds(2).run(trained, {"unit_bytes": 1}, ["a method"], mode):
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def fails_inside() -> list[float]:
    with get_strategy("fsdp") as strategy:
        model = strategy.setup_module(Coder())
        with pytest.raises(RuntimeError):
            model.encode(torch.ones(1, 5))
        with torch.no_grad():
            return model.encode(torch.ones(1, 4))[0].tolist()


def test_a_method_that_failed_can_be_called_again(worlds: Any) -> None:
    first, second = worlds(2).run(fails_inside)
    assert first == second


class Scaled(nn.Module):
    """Reads a list and a dict of parameters, which are never called themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.full((4,), 1.0 + number)) for number in range(2))
        self.shifts = nn.ParameterDict({"first": nn.Parameter(torch.linspace(0, 1, 4))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * self.scales[0] * self.scales[1] + self.shifts["first"])


class Weighed(nn.Module):
    """Reads all parameters inside it and has none of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(each.square().sum() for each in self.parameters()) + self.layers(x)


class Holder(nn.Module):
    def __init__(self, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = inner()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(x)


def listed(options: dict[str, Any], inner: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    with get_strategy("fsdp", **options) as strategy:
        model = Holder(inner)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        strategy.backward(model.loss(data(strategy.global_rank)), model)
        strategy.optimizer_step(optimizer)
        return {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


@pytest.mark.parametrize("options", [{}, {"unit_bytes": 1}], ids=["root", "units"])
@pytest.mark.parametrize("inner", [Scaled, Weighed])
def test_a_part_of_a_method_reads_parameters(
    worlds: Any, inner: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    plain = Holder(inner)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    torch.stack([plain.loss(data(rank)) for rank in range(2)]).mean().backward()
    optimizer.step()
    for weights in worlds(2).run(listed, options, inner):
        for name, tensor in plain.state_dict().items():
            assert torch.allclose(weights[name], tensor), name


class Asking(nn.Module):
    """Asks for its dtype in the middle of a method, and reads a parameter of its own after that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).to(next(self.parameters()).dtype) * self.scale
        x = self.second(x) * self.scale
        next(self.parameters())
        return (self.third(x) * self.scale).square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(x)


def asked(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    with get_strategy("fsdp", **options) as strategy:
        torch.manual_seed(0)
        model = Asking()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        for _ in range(2):
            strategy.backward(model.loss(data(strategy.global_rank)), model)
            strategy.optimizer_step(optimizer)
            model.zero_grad()
        return {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


@pytest.mark.parametrize("options", [{}, {"unit_bytes": 1}], ids=["root", "units"])
def test_a_method_lists_parameters_and_goes_on(worlds: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Asking()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        torch.stack([plain.loss(data(rank)) for rank in range(2)]).mean().backward()
        optimizer.step()
        plain.zero_grad()
    for weights in worlds(2).run(asked, options):
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)


class Stack(nn.Module):
    """Layers that share units, of which a method calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers(rows)
        return hidden

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers[0](rows)
        return hidden


def calls_seen() -> tuple[list[str], torch.Tensor | None]:
    """Give what users' hooks saw of the first two layers, and the gradient of the one that was called."""
    with get_strategy("fsdp", unit_bytes=160) as strategy:
        model = strategy.setup_module(Stack())
        own, seen = strategy.unwrap(model), []
        for number in (0, 1):
            own.layers[number].register_forward_pre_hook(lambda *_, number=number: seen.append(f"before {number}"))
            own.layers[number].register_forward_hook(lambda *_, number=number: seen.append(f"after {number}"))
        strategy.backward(own.encode(torch.ones(2, 4)).sum(), model)
        return seen, strategy.module_gradients(model).get("layers.0.weight")


def test_a_method_calls_no_hooks_of_layers_that_it_does_not_call(worlds: Any) -> None:
    seen, gradient = worlds(2).run(calls_seen)[0]
    assert seen == ["before 0", "after 0"]
    torch.testing.assert_close(gradient, torch.full((4, 4), 2.0))
