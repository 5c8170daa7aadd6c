"""Backwards that an exception ends, as a lack of memory does, and ``loss.backward()``: the run goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, Strategy, get_strategy
from shard_core.testing import oracle

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "units": ("fsdp", {"unit_bytes": 1}),
    "copies": ("hsdp", {"data_parallel_size": 2}),
    "offloaded": ("fsdp_cpu_offload", {}),
    "split": ("tp", {"tensor_parallel_size": 2, "plan": {"first": "colwise", "second": "rowwise"}}),
    **{f"stage {stage}": ("deepspeed", {"stage": stage}) for stage in (0, 1, 2, 3)},
}
REFUSING = ("ddp", "stage 1", "stage 2", "stage 3")
"""Where gradients are averaged in ``strategy.backward`` alone, so that ``loss.backward()`` is refused."""


class _Interruption(Exception):
    pass


class Net(nn.Module):
    """Two layers; ``at`` is between which a backward is interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)
        self.at = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        hidden = torch.tanh(self.first(x))
        if self.at == "forward":
            raise _Interruption(self.at)
        output: torch.Tensor = self.second(hidden)
        for name, tensor in (("input", x), ("middle", hidden), ("output", output)):
            if name == self.at:
                tensor.register_hook(_interrupt)
        return output.square().mean()


def _interrupt(gradient: torch.Tensor) -> None:
    raise _Interruption(tuple(gradient.shape))


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def plainly(ranks: int, numbers: list[list[int]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in numbers:
        for number in step:
            for rank in range(ranks):
                (model(batch(number, rank)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@contextlib.contextmanager
def started(layout: str) -> Iterator[tuple[Strategy, Any, torch.optim.Optimizer, int]]:
    """Start a strategy and set up; yield it, the model, the optimizer and the data rank."""
    name, options = LAYOUTS[layout]
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ready, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        yield strategy, ready, optimizer, strategy.distributed_sampler_kwargs["rank"]


def run(layout: str, at: str, zeroed: str, deferred: bool) -> dict[str, torch.Tensor]:
    """Step; then interrupt a micro-batch after another; step again, twice."""
    with started(layout) as (strategy, model, optimizer, rank):
        own: Any = strategy.unwrap(model)

        def backward(number: int) -> None:
            strategy.backward(model(batch(number, rank)), model)

        def step(*numbers: int) -> None:
            for number in numbers:
                backward(number)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()

        step(1)
        with strategy.no_backward_sync(model) if deferred else contextlib.nullcontext():
            backward(2)
        own.at = at
        with contextlib.suppress(_Interruption):
            backward(3)
        own.at = ""
        if zeroed == "by hand":
            for parameter in model.parameters():
                parameter.grad = None
        elif zeroed == "module":
            model.zero_grad()
        elif zeroed == "optimizer":
            optimizer.zero_grad()
        step(4)
        step(5, 6)
        weights = strategy.module_state_dict(model)
        return {name: tensor.clone() for name, tensor in strategy.broadcast(weights).items()}


@pytest.mark.parametrize(
    ("at", "zeroed", "deferred"),
    [
        ("forward", "optimizer", False),
        ("forward", "nothing", False),
        ("middle", "nothing", True),
        ("output", "by hand", True),
        ("middle", "module", True),
        ("middle", "optimizer", False),
        ("input", "by hand", False),
        ("input", "optimizer", True),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_after_an_interrupted_backward(
    worlds: Any, layout: str, at: str, zeroed: str, deferred: bool
) -> None:
    # What an exception ends in backward is thrown away, with all before it; in forward nothing is.
    second = [2, 4] if (at, zeroed) == ("forward", "nothing") else [4]
    truth = plainly(1 if layout == "split" else 2, [[1], second, [5, 6]])
    for weights in worlds(2).run(run, layout, at, zeroed, deferred):
        oracle.assert_same_weights(weights, truth, 1e-5)


def past_the_strategy(layout: str) -> dict[str, torch.Tensor] | str:
    with started(layout) as (strategy, model, optimizer, rank):
        said = ""
        try:
            model(batch(1, rank)).backward()
            strategy.backward(model(batch(2, rank)), model)
        except SetupError as error:
            said = str(error)
            model.zero_grad()
            for number in (1, 2):
                strategy.backward(model(batch(number, rank)), model)
        assert ("call strategy.backward(loss, model)" in said) == (layout in REFUSING), said
        strategy.optimizer_step(optimizer)
        weights = strategy.module_state_dict(model)
        return {name: tensor.clone() for name, tensor in strategy.broadcast(weights).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_backward_past_the_strategy_trains_right_or_is_refused(worlds: Any, layout: str) -> None:
    truth = plainly(1 if layout == "split" else 2, [[1, 2]])
    for weights in worlds(2).run(past_the_strategy, layout):
        oracle.assert_same_weights(weights, truth, 1e-5)
