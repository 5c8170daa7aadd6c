"""When units are gathered, seen on the profiler's time line."""

from typing import Any

import pytest
import torch
from layouts import LAYOUTS
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.profiler import ProfilerActivity, profile, record_function

from shard_core import InvalidOption, get_strategy


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.mix = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with record_function(f"use {self.number}"):
            return torch.tanh(self.mix(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(number) for number in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return x.sum()


KINDS = {"FSDP::all_gather": "gather", "FSDP::post_backward_reduce": "reduce"}


def time_line(name: str, options: dict[str, Any]) -> tuple[list[str], list[str], float]:
    """Return what a forward and a backward did, in order."""

    def named(seen: profile) -> list[str]:
        lines = []
        for event in sorted(seen.events(), key=lambda event: event.time_range.start):
            kind, _, unit = event.name.partition(" (")
            if kind in KINDS and unit.startswith("blocks"):
                lines.append(f"{KINDS[kind]} {unit.removeprefix('blocks.')[0]}")
            elif kind.startswith("use "):
                lines.append(kind)
        return lines

    with get_strategy(name, auto_wrap_policy={Block}, **LAYOUTS[name], **options) as strategy:
        strategy.seed_everything(0)
        model = Model()
        model, _ = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        strategy.backward(model(torch.ones(2, 8)), model)
        with profile(activities=[ProfilerActivity.CPU]) as forward:
            loss = model(torch.ones(2, 8))
        with profile(activities=[ProfilerActivity.CPU]) as backward:
            strategy.backward(loss, model)
        return named(forward), named(backward), loss.item()


LATE_FORWARD = ["gather 0", "use 0", "gather 1", "use 1", "gather 2", "use 2"]
EARLY_FORWARD = ["gather 0", "gather 1", "use 0", "gather 2", "use 1", "use 2"]
EARLY_BACKWARD = ["gather 2", "gather 1", "reduce 2", "gather 0", "reduce 1", "reduce 0"]
EARLIER_FORWARD = ["gather 0", "gather 1", "gather 2", "use 0", "use 1", "use 2"]
EARLIER_BACKWARD = ["gather 2", "gather 1", "gather 0", "reduce 2", "reduce 1", "reduce 0"]
LATE_BACKWARD = ["gather 2", "reduce 2", "gather 1", "reduce 1", "gather 0", "reduce 0"]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        ({}, LATE_FORWARD, EARLY_BACKWARD),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, LATE_FORWARD, LATE_BACKWARD),
        ({"backward_prefetch": None, "forward_prefetch": True}, EARLY_FORWARD, LATE_BACKWARD),
        ({"backward_prefetch": "BACKWARD_PRE", "forward_prefetch": True}, EARLY_FORWARD, EARLY_BACKWARD),
        ({"backward_prefetch": 1, "forward_prefetch": 1}, EARLY_FORWARD, EARLY_BACKWARD),
        ({"backward_prefetch": 2, "forward_prefetch": 2}, EARLIER_FORWARD, EARLIER_BACKWARD),
    ],
)
def test_units_are_gathered_when_they_are_asked_for(
    worlds: Any, name: str, options: dict[str, Any], forward: list[str], backward: list[str]
) -> None:
    losses = set()
    for seen_forward, seen_backward, loss in worlds(2).run(time_line, name, options):
        assert seen_forward == forward
        assert seen_backward == backward
        losses.add(loss)
    assert losses == {worlds(2).run(time_line, name, {})[0][2]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backward_prefetch": "backward_per"}, "'backward_per'; did you mean 'backward_pre'?"),
        ({"backward_prefetch": True}, "backward_prefetch is True; give 'backward_pre', 'backward_post', None, torch's"),
        ({"backward_prefetch": 0}, "backward_prefetch is 0; give 'backward_pre', 'backward_post', None, torch's"),
        ({"forward_prefetch": -1}, "forward_prefetch is -1; give True, False, or a number of units"),
        ({"forward_prefetch": "yes"}, "forward_prefetch is 'yes'; give True, False, or a number of units"),
    ],
)
def test_other_orders_get_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption) as error:
        get_strategy("fsdp", **options)
    assert message in str(error.value)
