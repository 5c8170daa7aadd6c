"""Ranks whose losses use different parameters are told so: upstream would mix up their gradients."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from xla_environments import HASTY

from shard_core import SetupError, get_strategy


class Either(nn.Module):
    """Has two layers of one size, and runs one of them or none."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.wide = nn.Linear(4, 400)  # its message is longer, however shards are filled up

    def forward(self, x: torch.Tensor, side: str) -> torch.Tensor:
        x = self.inlet(x)
        return (getattr(self, side)(x) if side else x).square().mean()


def each_its_own(sides: tuple[str, str], units: set[type[nn.Module]] | None, deferred: bool) -> str:
    with get_strategy("xla_fsdp", accelerator="xla", auto_wrap_policy=units) as strategy:
        model = strategy.setup_module(Either())
        inputs = strategy.batch_to_device(torch.ones(2, 4))
        side = sides[strategy.global_rank]
        try:
            if deferred:
                with strategy.no_backward_sync(model):
                    strategy.backward(model(inputs, side), model)
                side = "wide"
            strategy.backward(model(inputs, side), model)
        except SetupError as error:
            return str(error)
        return "gradients are mixed up, and nobody says so"


@pytest.mark.parametrize(
    ("sides", "units", "deferred"),
    [
        (("left", "right"), None, False),
        (("left", "right"), {nn.Linear}, False),
        (("left", "wide"), None, False),
        (("left", ""), None, False),
        (("left", ""), {nn.Linear}, False),
        (("", "wide"), {nn.Linear}, False),
        (("left", "right"), None, True),
        (("left", "right"), {nn.Linear}, True),
    ],
    ids=[
        "alike",
        "units alike",
        "of other sizes",
        "none",
        "units none",
        "none units",
        "before the last",
        "units before",
    ],
)
def test_what_would_be_mixed_up_is_refused(
    worlds: Any, sides: tuple[str, str], units: set[type[nn.Module]] | None, deferred: bool
) -> None:
    for refusal in worlds(2, HASTY).run(each_its_own, sides, units, deferred):
        assert re.match(
            r"the loss of rank \d has used '\w+\.(weight|bias)' and those of other ranks have not;"
            r"|ranks run different parts of a module, .*: rank 0 comes to the (unit of|end of a forward)",
            refusal,
        )


class Heads(nn.Module):
    """A unit of two outputs, of which each rank's loss may take its own; both have come through all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layer(x)
        return x.sum(), x.square().sum()


class Around(nn.Module):
    """Has a unit inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.heads = nn.Linear(4, 4), Heads()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out: tuple[torch.Tensor, torch.Tensor] = self.heads(self.first(x))
        return out


def each_its_outputs() -> Any:
    """Return the gradients where the loss of one rank takes both outputs, and that of the other takes one."""
    with get_strategy("xla_fsdp", accelerator="xla", auto_wrap_policy={Heads}) as strategy:
        strategy.seed_everything(0)
        model = strategy.setup_module(Around())
        first, second = model(strategy.batch_to_device(torch.ones(2, 4)))
        strategy.backward(first + second if strategy.global_rank == 0 else first, model)
        return {name: each.tolist() for name, each in strategy.module_gradients(model).items()}


def test_losses_may_take_other_outputs_of_one_unit(worlds: Any) -> None:
    torch.manual_seed(0)
    plain = Around()
    for both in (True, False):
        first, second = plain(torch.ones(2, 4))
        ((first + second if both else first) / 2).backward()
    found, _ = worlds(2, HASTY).run(each_its_outputs)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(torch.tensor(found[name]), parameter.grad, rtol=1e-4, atol=1e-4)


def output_after_teardown() -> list[float]:
    with get_strategy("xla_fsdp", accelerator="xla") as strategy:
        model = strategy.setup_module(Either())
        given = strategy.batch_to_device(torch.ones(2, 4))
        before = float(model(given, "left").detach())
    return [before, float(model(given, "left").detach())]


def test_a_rank_alone_compares_nothing(worlds: Any) -> None:
    ((before, after),) = worlds(1, HASTY).run(output_after_teardown)
    assert before == after
