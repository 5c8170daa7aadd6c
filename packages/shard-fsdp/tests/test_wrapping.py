"""Which submodules are sharded as one unit: by a policy, by hand, or both; and what is refused."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layouts import LAYOUTS
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from shard_core import InvalidOption, get_strategy
from shard_core.testing import models, oracle, train_under


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.layers = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(self.norm(x))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


class Guide(nn.Module):
    """The example of the guide to manual wrapping."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_layer = nn.Linear(32, 32)
        self.block = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    def configure_sharded_model(self) -> None:
        linear_layer = wrap(self.linear_layer)
        for i, layer in enumerate(self.block):
            self.block[i] = wrap(layer)
        self.model = nn.Sequential(linear_layer, nn.ReLU(), self.block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()


def units_of(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]


def is_mlp(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential)


BLOCKS = ["", "blocks.0", "blocks.1", "blocks.2"]
MLPS = ["", "blocks.0.layers", "blocks.1.layers", "blocks.2.layers"]
WIDE = ["", *(f"blocks.{n}.layers.{m}" for n in range(3) for m in (0, 2))]
POLICIES: dict[str, tuple[Any, list[str]]] = {
    "classes": ({Block}, BLOCKS),
    "list of classes": ([Block, nn.Sequential], sorted(BLOCKS + MLPS[1:])),
    "module wrap": (ModuleWrapPolicy({Block}), BLOCKS),
    "transformer": (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), BLOCKS),
    "size": (functools.partial(size_based_auto_wrap_policy, min_num_params=100), WIDE),
    "lambda": (functools.partial(lambda_auto_wrap_policy, lambda_fn=is_mlp), MLPS),
    "custom": (CustomPolicy(is_mlp), MLPS),
    "always": (always_wrap_policy, None),
}


def wrapped(layout: str, name: str) -> tuple[list[str], int]:
    policy = POLICIES[name][0]
    with get_strategy(layout, auto_wrap_policy=policy, **LAYOUTS[layout]) as strategy:
        with strategy.module_init_context():
            model = Tower()
        model, _ = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(torch.ones(2, 6))
        return units_of(model), sum(event.name.partition(" (")[0] == "FSDP::all_gather" for event in profile.events())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_decides_the_units(worlds: Any, layout: str, name: str) -> None:
    expected = POLICIES[name][1]
    for units, gathers in worlds(2).run(wrapped, layout, name):
        if expected is None:
            own = {n for n, p in Tower().named_modules() if any(True for _ in p.parameters(recurse=False))}
            assert own <= set(units)
            assert "blocks" not in units, "a list has no forward that could gather"
        else:
            assert units == expected
            assert gathers == len(expected), "each unit is gathered once in forward"


def train(options: dict[str, Any]) -> Any:
    return train_under("fsdp", options, "gpt", "adamw", steps=4)


@pytest.mark.parametrize("policy", [always_wrap_policy, {nn.Linear, nn.Embedding}])
def test_units_inside_units_and_ties_change_nothing_in_the_result(worlds: Any, policy: Any) -> None:
    truth = oracle.train(
        lambda: models.make("gpt"),
        lambda module: models.make_optimizer("adamw", module),
        models.batches("gpt", 4, 12),
    )
    oracle.assert_same(worlds(2).run(train, {"auto_wrap_policy": policy})[0], truth)


def tied(policy: Any) -> tuple[bool, list[str]]:
    with get_strategy("fsdp", auto_wrap_policy=policy) as strategy:
        model = strategy.setup_module(models.make("gpt"))
        return model.head.weight is model.embedding.weight, units_of(model)


def test_a_policy_that_would_part_tied_weights_leaves_them_to_the_root(worlds: Any) -> None:
    for same, units in worlds(2).run(tied, {nn.Linear, nn.Embedding}):
        assert same
        assert {"head", "embedding"}.isdisjoint(units)
        assert len(units) > 4


def refused(policy: Any) -> str:
    with (
        get_strategy("fsdp", auto_wrap_policy=policy) as strategy,
        pytest.raises(InvalidOption) as error,
    ):
        strategy.setup_module(Tower())
    return str(error.value)


class Blocks(nn.Module):
    """Not in the tower."""


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({Blocks}, "auto_wrap_policy names Blocks, of which the model has none; did you mean 'Block'?"),
        ({nn.ModuleList}, "auto_wrap_policy names ModuleList, which has no forward; name the class of what it holds."),
        ({nn.Linear, nn.ReLU}, "auto_wrap_policy names ReLU, which has no parameters here, so nothing of it is a unit"),
        (CustomPolicy(lambda module: {"cpu_offload": True} if is_mlp(module) else False), "'cpu_offload' of its own"),
    ],
)
def test_a_policy_that_cannot_be_followed_gets_a_sentence(policy: Any, message: str) -> None:
    assert message in refused(policy)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("Block", "auto_wrap_policy is 'Block'; give a set of classes"),
        ({"Block"}, "auto_wrap_policy names 'Block'; name classes of modules"),
        (set(), "give a set of classes"),
        (3, "auto_wrap_policy is 3"),
        (is_mlp, r"is called as policy\(module, recurse, nonwrapped_numel\), but is_mlp\(module: .*unexpected keyword"),
    ],
)
def test_what_is_no_policy_gets_a_sentence(policy: Any, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        get_strategy("fsdp", auto_wrap_policy=policy)


def by_hand(make: str, options: dict[str, Any]) -> tuple[list[str], Any]:
    """Train what a user has wrapped; give its units, and weights and losses."""
    with get_strategy("fsdp", **options) as strategy:
        strategy.seed_everything(3)
        model = BUILDERS[make](strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        units = units_of(model)
        return units, trained(strategy, model, optimizer)


def trained(strategy: Any, model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        strategy.backward(model(x), model)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


def wrapped_later(strategy: Any) -> nn.Module:
    with strategy.module_init_context():
        model = Guide()
    with strategy.module_sharded_context():
        model.configure_sharded_model()
    return model


def wrapped_within(strategy: Any) -> nn.Module:
    with strategy.module_init_context(), strategy.module_sharded_context():
        model = Guide()
        model.configure_sharded_model()
    return model


def built_outside(strategy: Any) -> nn.Module:
    model = Guide()
    with strategy.module_sharded_context():
        model.configure_sharded_model()
    return model


BUILDERS: dict[str, Callable[[Any], nn.Module]] = {
    "later": wrapped_later,
    "within": wrapped_within,
    "outside": built_outside,
}


@pytest.mark.parametrize("make", BUILDERS)
def test_what_is_wrapped_by_hand_is_a_unit(worlds: Any, make: str) -> None:
    single = by_hand_under("single", make)
    for units, weights in worlds(2).run(by_hand, make, {}):
        assert units == ["", "linear_layer", "block.0", "block.1"]
        assert weights.keys() == single.keys()
        for name, tensor in single.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def by_hand_under(name: str, make: str) -> dict[str, torch.Tensor]:
    """Run the program under a strategy that does not wrap: it is a plain one."""
    with get_strategy(name, accelerator="cpu") as strategy:
        strategy.seed_everything(3)
        model = BUILDERS[make](strategy)
        assert not units_of(model)
        model, (optimizer,) = strategy.setup_module_and_optimizers(
            model, [torch.optim.AdamW(model.parameters(), lr=0.01)]
        )
        assert not units_of(model)
        return trained(strategy, model, optimizer)


def mixed() -> tuple[list[str], list[str]]:
    found = []
    for options in ({"unit_bytes": 1}, {"auto_wrap_policy": {nn.Sequential}}):
        with get_strategy("fsdp", **options) as strategy:
            model = Tower()
            with strategy.module_sharded_context(), strategy.module_sharded_context():
                wrap(model.head)
                wrap(model.blocks[1])
            assert wrap(model.blocks[0]) is model.blocks[0]
            found.append(units_of(strategy.setup_module(model)))
    return found[0], found[1]


def test_setup_wraps_what_hands_have_left(worlds: Any) -> None:
    for by_bytes, by_policy in worlds(2).run(mixed):
        assert by_bytes == [*BLOCKS, "head"]
        assert by_policy == ["", "blocks.0.layers", "blocks.1", "blocks.1.layers", "blocks.2.layers", "head"]


def test_what_cannot_be_wrapped_gets_a_sentence() -> None:
    with get_strategy("fsdp") as strategy, strategy.module_sharded_context():
        with pytest.raises(InvalidOption, match="wrap\\(\\) was given a ModuleList, which has no forward"):
            wrap(nn.ModuleList())
        with pytest.raises(InvalidOption, match="wrap\\(\\) gives Linear 'mixed_precision' of its own"):
            wrap(nn.Linear(2, 2), mixed_precision=None)
