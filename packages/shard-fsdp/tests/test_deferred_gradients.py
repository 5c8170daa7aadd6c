"""Gradients that wait for the last micro-batch are there when it comes, and only those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shard_core import SetupError, get_strategy
from shard_core.testing import models, oracle, set_up


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


def _throw_some_away(model: Any, optimizer: Any) -> None:
    del optimizer
    model.first.weight.grad = None


DISCARDS: dict[str, Callable[[Any, Any], None]] = {
    "optimizer.zero_grad": lambda _, optimizer: optimizer.zero_grad(),
    "model.zero_grad": lambda model, _: model.zero_grad(),
}
TOUCHES: dict[str, Callable[[Any, Any], None]] = {
    "zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "some thrown away": _throw_some_away,
    "scaled": _scale,
    "replaced": _replace,
    "shards scaled": _scale_shards,
}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fsdp": (2, "fsdp", {"unit_bytes": 1}),
    "offloaded": (2, "fsdp_cpu_offload", {}),
    "hsdp": (4, "hsdp", {"device_mesh": (2, 2)}),
}


Gradients = dict[str, torch.Tensor]


def touched(layout: str, touch: str, sent: bool) -> tuple[str, Gradients]:
    """Touch gradients between two micro-batches, the first of which is deferred, perhaps after one that is not.

    Returns:
        What was refused, and the gradients of one micro-batch after it.
    """
    _, name, options = LAYOUTS[layout]
    with get_strategy(name, **options) as strategy:
        model, optimizer = set_up(strategy, "plain", "sgd")
        first, second = (models.share_of(strategy, batch) for batch in models.batches("plain", 2, 12))
        if sent:
            strategy.backward(model(*second), model)
        with strategy.no_backward_sync(model):
            strategy.backward(model(*first), model)
        (TOUCHES | DISCARDS)[touch](model, optimizer)
        refusal = ""
        try:
            strategy.backward(model(*second), model)
        except SetupError as error:
            refusal = str(error)
            strategy.backward(model(*second), model)
        return refusal, strategy.module_gradients(model)


def of_the_second_alone() -> Gradients:
    torch.manual_seed(0)
    model = models.make("plain")
    model(*models.batches("plain", 2, 12)[1]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("layout", "touch", "sent"),
    [
        *(("fsdp", touch, sent) for touch in (*TOUCHES, *DISCARDS) for sent in (False, True)),
        *((layout, touch, False) for layout in ("offloaded", "hsdp") for touch in ("scaled", "optimizer.zero_grad")),
    ],
)
def test_what_waits_is_thrown_away_whole(worlds: Any, layout: str, touch: str, sent: bool) -> None:
    """Also where that was refused: a script that goes on must not step with what it has thrown away."""
    answers = worlds(LAYOUTS[layout][0]).run(touched, layout, touch, sent)
    assert {refusal.split(" or some")[0] for refusal, _ in answers} == (
        {""} if touch in DISCARDS else {"gradients were changed,"}
    )
    oracle.assert_same_weights(answers[0][1], of_the_second_alone(), 1e-5)


def between(touch: bool) -> float:
    """Train another module between two micro-batches; return the norm, perhaps after throwing away the first."""
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
        strategy.backward(model(*second) * count, model, denominator=count)
        return strategy.clip_gradients_norm(model, optimizer, float("inf")).item()


def norm_of(batches: Sequence[Any], micro_batches: int) -> float:
    torch.manual_seed(0)
    model = models.make("plain")
    for batch in batches:
        (model(*batch) / micro_batches).backward()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()


def test_what_waits_does_so_while_another_module_is_trained(worlds: Any) -> None:
    batches = models.batches("plain", 2, 12)
    assert worlds(2).run(between, False) == [pytest.approx(norm_of(batches, 2), rel=1e-5)] * 2
    assert worlds(2).run(between, True) == [pytest.approx(norm_of(batches[1:], 1), rel=1e-5)] * 2


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


class OneByOne(torch.nn.Module):
    """Layers that a method calls one by one, two of which are one unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, width), torch.nn.Linear(width, 6))
        self.top = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.top(self.body(x))
        return hidden.square().mean()

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


COPIES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {"sharding_strategy": "NO_SHARD"}),
    "hsdp": (4, {"device_mesh": (2, 2)}),
}


def rows(rank: int, ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 6, generator=generator)[rank::ranks] for _ in range(3)]


def one_by_one(name: str, width: int, plain: bool, whole: Sequence[int]) -> Gradients:
    """Return the gradients of three micro-batches, the first two of which wait, some of them by forward."""
    ranks, options = COPIES[name]
    with get_strategy(name, unit_bytes=200, **options) as strategy:
        strategy.seed_everything(0)
        model: Any = OneByOne(width)
        model, _ = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters())])
        for number, x in enumerate(rows(strategy.global_rank, ranks)):
            with strategy.no_backward_sync(model, enabled=number < 2):
                loss = model(x) if number in whole else strategy.unwrap(model).score(x)
                if plain and number < 2:
                    loss.backward()
                else:
                    strategy.backward(loss, model)
        return strategy.module_gradients(model)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("whole", [(), (1,)])
@pytest.mark.parametrize("width", [6, 5])
@pytest.mark.parametrize("name", COPIES)
def test_what_waits_of_a_unit_called_in_parts_is_added_up_by_parameter(
    worlds: Any, name: str, width: int, plain: bool, whole: Sequence[int]
) -> None:
    torch.manual_seed(0)
    model = OneByOne(width)
    for x in rows(0, 1):
        model(x).backward()
    expected: Gradients = {key: each.grad for key, each in model.named_parameters()}  # type: ignore[misc]
    oracle.assert_same_weights(worlds(COPIES[name][0]).run(one_by_one, name, width, plain, whole)[0], expected, 1e-5)


def sent_between_copies(name: str) -> list[int]:
    """Count the messages between copies in each of three micro-batches, the first two of which wait."""
    counts, all_reduce = [0], dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counts[-1] += tensor.is_floating_point()  # else ranks compare what they do
        return all_reduce(tensor, *args, **kwargs)

    with (
        get_strategy(name, unit_bytes=200, **COPIES[name][1]) as strategy,
        mock.patch.object(dist, "all_reduce", counted),
    ):
        model: Any = OneByOne(6)
        model, _ = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters())])
        for number in range(3):
            counts.append(0)
            with strategy.no_backward_sync(model, enabled=number < 2):
                strategy.backward(strategy.unwrap(model).score(torch.ones(2, 6)), model)
    return counts[1:]


@pytest.mark.parametrize("name", COPIES)
def test_what_waits_of_a_unit_called_in_parts_is_sent_between_copies_once(worlds: Any, name: str) -> None:
    for first, second, last in worlds(COPIES[name][0]).run(sent_between_copies, name):
        assert (first, second) == (0, 0)
        assert last == 3  # a unit of two layers, one of one, and the root's
