"""When units are gathered, seen on the profiler's time line."""

from typing import Any

import pytest
import torch
from layouts import LAYOUTS
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.profiler import ProfilerActivity, profile, record_function

from shard_core import InvalidOption, get_strategy
from shard_core.testing import oracle


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


class Clamped(nn.Module):
    """Blocks whose weights are clamped before they compute, when some were gathered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(number) for number in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, block in enumerate(self.blocks):
            with torch.no_grad():
                block.mix.weight.clamp_(-0.2 + place / 50, 0.2)
            x = block(x)
        return x


def train_clamped(options: dict[str, Any], checkpointed: bool) -> dict[str, torch.Tensor]:
    with get_strategy("fsdp", activation_checkpointing={Block} if checkpointed else None, **options) as strategy:
        model = Clamped()
        optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        for _ in range(3):
            strategy.backward(model(torch.linspace(-1, 1, 16).reshape(2, 8)).square().sum(), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return strategy.module_state_dict(model)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"auto_wrap_policy": {Block}, "forward_prefetch": True},
        {"auto_wrap_policy": {Block}, "forward_prefetch": 2, "reshard_after_forward": False},
        {"unit_bytes": 500, "forward_prefetch": 2},  # two blocks each
    ],
    ids=str,
)
def test_what_is_written_to_a_unit_that_is_being_gathered_counts(
    worlds: Any, options: dict[str, Any], checkpointed: bool
) -> None:
    plain = Clamped()
    optimizer = torch.optim.SGD(plain.parameters(), lr=3.0)
    for _ in range(3):
        plain(torch.linspace(-1, 1, 16).reshape(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    oracle.assert_same_weights(worlds(2).run(train_clamped, options, checkpointed)[0], plain.state_dict(), 1e-5)


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
