"""What a strategy does not declare raises when it is used, whatever the engine could do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import Capability, get_strategy
from shard_core.errors import MissingCapability
from shard_core.testing import models

PLUGIN = """
import dataclasses
from shard_core import Capability
from shard_core.plugins import hookimpl
from shard_core.strategies.plugin import DDP


@hookimpl
def shard_strategy(name):
    lacking = Capability[name.removeprefix("lacks_").upper()]
    return dataclasses.replace(DDP, name=name, capabilities=frozenset(Capability) - {lacking})
"""


def name_of(capability: Capability) -> str:
    return f"lacks_{capability.name.lower()}"


@pytest.fixture(autouse=True)
def _lacking(site: Any) -> None:
    """Install a ddp for each capability that declares all others."""
    names = {name_of(capability): "lacking_plugin" for capability in Capability}
    site.install("shard-lacking", entries={"shard.strategies": names}, modules={"lacking_plugin": PLUGIN})


def descent(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def ready(strategy: Any, build: Callable[[Any], torch.optim.Optimizer] = descent) -> Any:
    module = models.make("plain")
    module, (optimizer,) = strategy.setup_module_and_optimizers(module, [build(module)])
    return module, optimizer


def loss_of(module: nn.Module) -> Any:
    return module(*models.batches("plain", 1, 4)[0])


def two_optimizers(strategy: Any) -> None:
    module = models.make("plain")
    strategy.setup_module_and_optimizers(module, [descent(module.first), descent(module.second)])


def another_optimizer(strategy: Any) -> None:
    module = strategy.setup_module(models.make("plain"))
    for half in (strategy.unwrap(module).first, strategy.unwrap(module).second):
        strategy.setup_optimizer(descent(half))


def clip_value(strategy: Any) -> None:
    strategy.clip_gradients_value(*ready(strategy), 1.0)


def clip_any_norm(strategy: Any) -> None:
    strategy.clip_gradients_norm(*ready(strategy), 1.0, 1.0)


def meta_init(strategy: Any) -> None:
    with strategy.module_init_context(empty_init=True):
        pass


def no_optimizers(strategy: Any) -> None:
    strategy.setup_module_and_optimizers(models.make("plain"), [])


def closure(strategy: Any) -> None:
    _, optimizer = ready(strategy)
    strategy.optimizer_step(optimizer, lambda: None)


def compiled(strategy: Any) -> None:
    strategy.setup_module(torch.compile(models.make("plain"), backend="eager"))


def compiled_inside(strategy: Any) -> None:
    module = models.make("plain")
    module.second = torch.compile(module.second, backend="eager")  # type: ignore[assignment]
    strategy.setup_module(module)


def compiled_in_place(strategy: Any) -> None:
    module = models.make("plain")
    module.second.compile(backend="eager")  # type: ignore[operator]
    strategy.setup_module(module)


def compiled_forward(strategy: Any) -> None:
    module = models.make("plain")
    module.forward = torch.compile(module.forward, backend="eager")  # type: ignore[method-assign]
    strategy.setup_module(module)


def sync_grads(strategy: Any) -> None:
    strategy.all_gather(torch.ones(1), sync_grads=True)


def denominator(strategy: Any) -> None:
    module, _ = ready(strategy)
    strategy.backward(loss_of(module), module, denominator=4)


def any_optimizer(strategy: Any) -> None:
    ready(strategy, lambda module: torch.optim.Adafactor(module.parameters()))


def any_optimizer_later(strategy: Any) -> None:
    module = strategy.setup_module(models.make("plain"))
    strategy.setup_optimizer(torch.optim.LBFGS(strategy.unwrap(module).parameters()))


def entry_method(strategy: Any) -> None:
    module, _ = ready(strategy)
    strategy.backward(loss_of(module), module)
    strategy.unwrap(module).predict(torch.ones(1, 6))


def forward_of_the_users_own(strategy: Any) -> None:
    module, _ = ready(strategy)
    strategy.backward(loss_of(strategy.unwrap(module)), module)


def several_modules(strategy: Any) -> None:
    ready(strategy)
    ready(strategy)


def unfreeze(strategy: Any) -> None:
    module = models.make("frozen")
    module, _ = strategy.setup_module_and_optimizers(module, [descent(module)])
    strategy.unwrap(module).first.bias.requires_grad_(True)
    strategy.backward(loss_of(module), module)


USES: dict[Capability, list[Callable[[Any], None]]] = {
    Capability.MULTIPLE_OPTIMIZERS: [two_optimizers, another_optimizer],
    Capability.CLIP_VALUE: [clip_value],
    Capability.CLIP_ANY_NORM: [clip_any_norm],
    Capability.META_INIT: [meta_init],
    Capability.INFERENCE: [lambda strategy: strategy.setup_module(models.make("plain")), no_optimizers],
    Capability.CLOSURE: [closure],
    Capability.COMPILE: [compiled, compiled_inside, compiled_in_place, compiled_forward],
    Capability.SYNC_GRADS: [sync_grads],
    Capability.DENOMINATOR: [denominator],
    Capability.ANY_OPTIMIZER: [any_optimizer, any_optimizer_later],
    Capability.ENTRY_METHODS: [entry_method, forward_of_the_users_own],
    Capability.SEVERAL_MODULES: [several_modules],
    Capability.UNFREEZE: [unfreeze],
}

#: Those one asks for when the strategy is built.
OPTIONS: dict[Capability, list[dict[str, Any]]] = {
    Capability.FP16: [{"precision": "16-mixed"}, {"precision": 16}, {"precision": "16-true"}],
    Capability.CPU_OFFLOAD: [{"cpu_offload": True}],
}


#: Saves traffic and allows no call: ``no_backward_sync`` is legal under every strategy.
NEVER_REFUSED = {Capability.DEFER_SYNC}


def test_every_capability_is_tried() -> None:
    assert set(USES) | set(OPTIONS) | NEVER_REFUSED == set(Capability)


@pytest.mark.parametrize(
    ("capability", "use"), [(capability, use) for capability, uses in USES.items() for use in uses]
)
def test_what_is_not_declared_raises_when_it_is_used(capability: Capability, use: Callable[[Any], None]) -> None:
    with get_strategy(name_of(capability), accelerator="cpu") as strategy, pytest.raises(MissingCapability) as error:
        use(strategy)
    assert f"strategy {name_of(capability)!r} does not promise {capability.name}: " in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("capability", "options"), [(capability, each) for capability, all_of in OPTIONS.items() for each in all_of]
)
def test_what_is_not_declared_raises_when_it_is_asked_for(capability: Capability, options: dict[str, Any]) -> None:
    with pytest.raises(MissingCapability) as error:
        get_strategy(name_of(capability), **options)
    assert name_of(capability) in str(error.value)
    assert capability.name in str(error.value)


def test_who_has_a_capability_is_told() -> None:
    with pytest.raises(
        MissingCapability, match=r"leave cpu_offload out\. Of the installed .*lacks_clip_value, .* can\."
    ):
        get_strategy("ddp", cpu_offload=True)


@pytest.mark.parametrize("capability", [Capability.COMPILE, Capability.ANY_OPTIMIZER, Capability.ENTRY_METHODS])
def test_what_is_not_declared_does_not_stand_in_the_way_of_the_rest(capability: Capability) -> None:
    with get_strategy(name_of(capability), accelerator="cpu") as strategy:
        module, optimizer = ready(strategy, lambda module: torch.optim.AdamW(module.parameters()))
        for _ in range(2):
            strategy.backward(loss_of(module), module)
            assert strategy.optimizer_step(optimizer)


def test_what_defers_no_sync_logs_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with get_strategy("lacks_defer_sync", accelerator="cpu") as strategy:
        module, optimizer = ready(strategy)
        with strategy.no_backward_sync(module, enabled=False):
            strategy.backward(loss_of(module), module)
        assert not caplog.records
        for _ in range(2):
            with strategy.no_backward_sync(module):
                strategy.backward(loss_of(module), module)
        strategy.backward(loss_of(module), module)
        assert strategy.optimizer_step(optimizer)
    (record,) = caplog.records
    assert record.getMessage() == (
        "strategy 'lacks_defer_sync' sends gradients in every backward, inside no_backward_sync too: "
        "the gradient is the same, and no traffic is saved."
    )
