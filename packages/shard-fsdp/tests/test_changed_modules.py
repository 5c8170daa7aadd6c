"""Modules that users change before setup and after it: laid out otherwise, loaded part by part, given new layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, ShardError, get_strategy
from shard_core.testing import oracle

NAMES = ["ddp", "fsdp"]


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(16, 2))


def loaded(assign: bool) -> dict[str, torch.Tensor]:
    with get_strategy("fsdp") as strategy:
        model = strategy.setup_module(build())
        model(torch.ones(1, 3, 3, 3))  # the root keeps what it has gathered
        torch.manual_seed(9)
        strategy.unwrap(model)[2].load_state_dict(nn.Linear(16, 2).state_dict(), assign=assign)
        model(torch.ones(1, 3, 3, 3))
        return strategy.module_state_dict(model)


@pytest.mark.parametrize("assign", [False, True])
def test_a_part_loads_its_own_state_dict(worlds: Any, assign: bool) -> None:
    torch.manual_seed(9)
    expected = {f"2.{name}": each for name, each in nn.Linear(16, 2).state_dict().items()}
    weights = worlds(2).run(loaded, assign)[0]
    oracle.assert_same_weights({name: weights[name] for name in expected}, expected, 0)


def channels_last(name: str) -> dict[str, torch.Tensor]:
    with get_strategy(name) as strategy:
        model = build().to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        for _ in range(2):
            strategy.backward(model(images(strategy.global_rank)).square().mean(), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return strategy.module_state_dict(model)


def images(rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 54).reshape(2, 3, 3, 3) * (1 + rank)


@pytest.mark.parametrize("name", NAMES)
def test_channels_last_trains(worlds: Any, name: str) -> None:
    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for rank in range(2):
            (plain(images(rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    oracle.assert_same_weights(worlds(2).run(channels_last, name)[0], plain.state_dict(), 1e-5)


def given_a_layer(name: str, late: bool) -> str:
    """Put an adapter into a module that was set up, and train it; return the refusal."""
    with get_strategy(name) as strategy:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        own = strategy.unwrap(model)
        adapter = nn.Linear(2, 2)
        own.append(adapter)
        try:
            if late:
                strategy.setup_optimizer(torch.optim.SGD([*own.parameters()], lr=0.1))
            optimizer.add_param_group({"params": list(adapter.parameters())})
            strategy.backward(model(images(strategy.global_rank)).square().mean(), model)
            strategy.optimizer_step(optimizer)
        except SetupError as error:
            return str(error)
        return "trained"


def given_layers_in_turn(name: str) -> list[str]:
    """Exchange a layer again and again, so that the memory of one is the next one's; return the refusals."""
    with get_strategy(name) as strategy:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        own = strategy.unwrap(model)
        refusals = []
        for _ in range(3):
            own[2] = nn.Linear(16, 2)
            try:
                strategy.setup_optimizer(torch.optim.SGD(own.parameters(), lr=0.1))
            except SetupError as error:
                refusals.append(str(error))
        return refusals


@pytest.mark.parametrize("name", NAMES)
def test_every_exchanged_layer_is_refused(worlds: Any, name: str) -> None:
    for refusals in worlds(2).run(given_layers_in_turn, name):
        assert len(refusals) == 3, refusals


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_layers_that_come_after_setup_are_refused_by_name(worlds: Any, name: str, late: bool) -> None:
    for message in worlds(2).run(given_a_layer, name, late):
        assert message.startswith("an optimizer steps '3.weight', which was put into the module after setup"), message


def exchange(model: Any) -> torch.Tensor:
    model[2].weight = nn.Parameter(torch.ones(2, 16))
    return model(images(0))


def tie(model: Any) -> torch.Tensor:
    model[2].bias = model[0].bias
    return model(images(0))


def normalise(model: Any) -> torch.Tensor:
    nn.utils.parametrizations.weight_norm(model[2])
    return model(images(0))


def call_with_others(model: Any) -> torch.Tensor:
    halves = {name: parameter * 0.5 for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, halves, (images(0),))


EXCHANGES = {each.__name__: each for each in (exchange, tie, normalise, call_with_others)}


def exchanged(how: str, options: dict[str, Any]) -> str:
    """Put something else in a parameter's place, after a step and while the root is gathered; return the refusal."""
    with get_strategy("fsdp", **options) as strategy:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        strategy.backward(model(images(strategy.global_rank)).square().mean(), model)
        strategy.optimizer_step(optimizer)
        model(images(strategy.global_rank))
        try:
            EXCHANGES[how](strategy.unwrap(model))
        except SetupError as error:
            return str(error)
        return "computed"


@pytest.mark.parametrize("options", [{}, {"unit_bytes": 1, "reshard_after_forward": True}], ids=["root", "freed"])
@pytest.mark.parametrize("how", EXCHANGES)
def test_exchanged_parameters_are_refused_by_name(worlds: Any, how: str, options: dict[str, Any]) -> None:
    for message in worlds(2).run(exchanged, how, options):
        assert "is not the parameter that setup has left there" in message, message
        assert message.startswith(("'2.", "'0.weight'")), message


def forgotten(name: str) -> tuple[str, bool]:
    """Step with an optimizer from before setup that was not set up; return the refusal, and whether weights changed."""
    with get_strategy(name) as strategy:
        made = build()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        model = strategy.setup_module(made)
        before = dict(strategy.module_state_dict(model))
        strategy.backward(model(torch.ones(2, 3, 3, 3)).square().mean(), model)
        refusal = ""
        try:
            optimizer.step()
        except SetupError as error:
            refusal = str(error)
        after = strategy.module_state_dict(model)
        return refusal, not all(torch.equal(before[key], after[key]) for key in after)


def test_an_optimizer_that_was_forgotten_steps_or_says_so(worlds: Any) -> None:
    assert worlds(2).run(forgotten, "ddp")[0] == ("", True)
    for refusal, changed in worlds(2).run(forgotten, "fsdp"):
        assert "was not set up, and steps parameters that setup has replaced" in refusal
        assert not changed


def moved(name: str, options: dict[str, Any], when: str, doubled: bool) -> Any:
    """Move and cast a module and back, and train on; return the weights, or the refusal of one that stays cast."""
    with get_strategy(name, **options) as strategy:
        torch.manual_seed(3)
        made = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        model, (optimizer,) = strategy.setup_module_and_optimizers(made, [torch.optim.SGD(made.parameters(), lr=0.1)])
        for step in range(3):
            if step == (0 if when == "setup" else 2):
                strategy.unwrap(model).to("cpu")
                strategy.unwrap(model).double()
                if not doubled:
                    strategy.unwrap(model).float()
            try:
                strategy.backward(model(torch.ones(2, 3) * (1 + strategy.global_rank)).square().mean(), model)
            except ShardError as error:
                return str(error)
            optimizer.step()
            optimizer.zero_grad()
        return strategy.broadcast(strategy.module_state_dict(model))


@pytest.mark.parametrize("when", ["setup", "steps"])
@pytest.mark.parametrize(("name", "options"), [("ddp", {}), ("fsdp", {}), ("hsdp", {"device_mesh": (2, 1)})])
def test_a_module_that_is_moved_and_cast_back_trains_on(
    worlds: Any, name: str, options: dict[str, Any], when: str
) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        losses = [model(torch.ones(2, 3) * (1 + rank)).square().mean() for rank in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in worlds(2).run(moved, name, options, when, False):
        oracle.assert_same_weights(weights, model.state_dict(), 1e-5)


def test_a_module_that_stays_cast_is_refused(worlds: Any) -> None:
    for refusal in worlds(2).run(moved, "fsdp", {}, "steps", True):
        assert "float64" in refusal
