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
