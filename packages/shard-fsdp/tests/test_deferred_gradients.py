"""Gradients that wait for the last micro-batch are there when it comes, and only those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shard_core import SetupError, get_strategy
from shard_core.testing import models, set_up


def _scale(model: Any, optimizer: Any) -> None:
    del optimizer
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def _replace(model: Any, optimizer: Any) -> None:
    del optimizer
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5


def _scale_shards(model: Any, optimizer: Any) -> None:
    del optimizer
    for parameter in model.parameters():
        parameter.grad.to_local().mul_(0.5)


TOUCHES: dict[str, Callable[[Any, Any], None]] = {
    "optimizer.zero_grad": lambda _, optimizer: optimizer.zero_grad(),
    "zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda model, _: model.zero_grad(),
    "scaled": _scale,
    "replaced": _replace,
    "shards scaled": _scale_shards,
}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fsdp": (2, "fsdp", {"unit_bytes": 1}),
    "offloaded": (2, "fsdp_cpu_offload", {}),
    "hsdp": (4, "hsdp", {"device_mesh": (2, 2)}),
}


def touched(layout: str, touch: str, sent: bool) -> str:
    """Touch gradients between two micro-batches, the first of which is deferred, perhaps after one that is not."""
    _, name, options = LAYOUTS[layout]
    with get_strategy(name, **options) as strategy:
        model = models.make("plain")
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        first, second = models.batches("plain", 2, 12)
        if sent:
            strategy.backward(model(*models.share_of(strategy, second)), model)
        with strategy.no_backward_sync(model):
            strategy.backward(model(*models.share_of(strategy, first)), model)
        TOUCHES[touch](model, optimizer)
        loss = model(*models.share_of(strategy, second))
        with pytest.raises(SetupError) as error:
            strategy.backward(loss, model)
        return str(error.value)


@pytest.mark.parametrize(
    ("layout", "touch", "sent"),
    [
        *(("fsdp", touch, False) for touch in TOUCHES),
        *(("fsdp", touch, True) for touch in TOUCHES),
        ("offloaded", "optimizer.zero_grad", False),
        ("hsdp", "optimizer.zero_grad", False),
    ],
)
def test_throwing_away_what_waits_is_refused(worlds: Any, layout: str, touch: str, sent: bool) -> None:
    for message in worlds(LAYOUTS[layout][0]).run(touched, layout, touch, sent):
        assert message.startswith(
            "the gradient of 'first.weight' was thrown away or changed while it waits on its rank"
        )


def between(touch: bool) -> float | str:
    """Train another module between two micro-batches; return the norm, or the refusal if gradients are thrown away."""
    with get_strategy("fsdp") as strategy:
        model, optimizer = set_up(strategy, "plain", "sgd")
        other, _ = set_up(strategy, "plain", "sgd")
        first, second = (models.share_of(strategy, batch) for batch in models.batches("plain", 2, 12))
        count = first[1].numel()
        with strategy.no_backward_sync(model):
            strategy.backward(model(*first) * count, model, denominator=count)
        strategy.backward(other(*second), other)
        if touch:
            optimizer.zero_grad()
        loss = model(*second) * count
        try:
            strategy.backward(loss, model, denominator=count)
        except SetupError as error:
            return str(error)
        return strategy.clip_gradients_norm(model, optimizer, float("inf")).item()


def test_what_waits_does_so_while_another_module_is_trained(worlds: Any) -> None:
    torch.manual_seed(0)
    model = models.make("plain")
    for batch in models.batches("plain", 2, 12):
        (model(*batch) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    assert worlds(2).run(between, False) == [pytest.approx(norm, rel=1e-5)] * 2
    for message in worlds(2).run(between, True):
        assert message.startswith("the gradient of 'first.weight' was thrown away or changed while it waits")


def nested(layout: str) -> bool:
    """Return whether gradients still wait after a backward in the outer of two contexts."""
    _, name, options = LAYOUTS[layout]
    with get_strategy(name, **options) as strategy:
        model, _ = set_up(strategy, "plain", "sgd")
        batch = models.share_of(strategy, *models.batches("plain", 1, 12))
        with strategy.no_backward_sync(model):
            with strategy.no_backward_sync(model):
                strategy.backward(model(*batch), model)
            strategy.backward(model(*batch), model)
        return not any(parameter.grad.to_local().any() for parameter in model.parameters())


@pytest.mark.parametrize("layout", ["fsdp", "hsdp"])
def test_the_end_of_an_inner_context_does_not_end_the_outer(worlds: Any, layout: str) -> None:
    assert all(worlds(LAYOUTS[layout][0]).run(nested, layout))


def left_out() -> dict[str, bool]:
    """Return which parameters have a gradient after two micro-batches, none of which uses a layer."""
    with get_strategy("fsdp", unit_bytes=1) as strategy:
        model = models.make("unused")
        model, _ = strategy.setup_module_and_optimizers(model, [torch.optim.AdamW(model.parameters())])
        for number, batch in enumerate(models.batches("unused", 3, 12)):
            with strategy.no_backward_sync(model, enabled=number < 2):
                strategy.backward(model(*models.share_of(strategy, batch)), model)
        return {name: parameter.grad is not None for name, parameter in model.named_parameters()}


def test_what_no_micro_batch_reaches_gets_no_gradient(worlds: Any) -> None:
    for found in worlds(2).run(left_out):
        assert {name for name, has in found.items() if not has} == {"unused.weight", "unused.bias"}


def unfreeze_a_scalar() -> tuple[list[float], float]:
    with get_strategy("fsdp") as strategy:
        strategy.seed_everything(0)
        model = models.make("scalar")
        model.temperature.requires_grad_(False)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        model.temperature.requires_grad_(True)
        losses = []
        for batch in models.batches("scalar", 3, 12):
            loss = model(*models.share_of(strategy, batch))
            strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(strategy.all_reduce(loss.detach()).item())
        return losses, model.temperature.item()


def test_what_is_whole_on_every_rank_is_averaged_though_it_was_frozen_at_setup(worlds: Any) -> None:
    torch.manual_seed(0)
    model = models.make("scalar")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for batch in models.batches("scalar", 3, 12):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for losses, temperature in worlds(2).run(unfreeze_a_scalar):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert temperature == pytest.approx(model.temperature.item(), rel=1e-6)
