"""Ranks whose losses use different parameters train as plain PyTorch does, or are refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing.oracle import assert_same_weights

SHARDING: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "fsdp_cpu_offload": {"unit_bytes": 1},
    "hsdp": {"device_mesh": (1, 2)},
    "tp": {"tensor_parallel_size": 1, "plan": {}},
    "deepspeed": {"stage": 0},
    "deepspeed_stage_1": {},
    "deepspeed_stage_2": {},
    "deepspeed_stage_3": {"param_persistence_threshold": 0},
}
SIDES = ("left", "right")


class Either(nn.Module):
    """Has two layers of one size, and runs one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, side: str) -> torch.Tensor:
        return getattr(self, side)(x).square().mean()


def batch(rank: int) -> torch.Tensor:
    return torch.ones(2, 4) * (1 + rank)


def each_its_own(name: str, options: dict[str, Any], deferred: bool) -> Any:
    """Return the gradients where each rank runs another layer, or why there are none."""
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        torch.manual_seed(0)
        model: Any = Either()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        rank = strategy.global_rank
        sides = (SIDES[rank], SIDES[1 - rank]) if deferred else (SIDES[rank],)
        try:
            for micro, side in enumerate(sides):
                with strategy.no_backward_sync(model, enabled=micro < len(sides) - 1):
                    strategy.backward(model(batch(rank), side), model)
        except SetupError as error:
            return str(error)
        return strategy.module_gradients(model)


MIXED_UP = {
    **dict.fromkeys(
        ("deepspeed_stage_1", "deepspeed_stage_2"),
        "and those of other ranks have not; this strategy sends gradients of several parameters",
    ),
    "deepspeed_stage_3": "ranks run different parts of a module",  # before parameters are gathered for one of them
}


@pytest.mark.parametrize(("name", "deferred"), [*((name, False) for name in MIXED_UP), ("deepspeed_stage_1", True)])
def test_what_would_be_mixed_up_is_refused(
    worlds: Any, name: str, deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for refusal in worlds(2).run(each_its_own, name, SHARDING[name], deferred):
        assert isinstance(refusal, str), "gradients are mixed up, and nobody says so"
        assert MIXED_UP[name] in refusal


@pytest.mark.parametrize("name", ["fsdp", "tp"])
def test_what_is_deferred_until_all_ranks_have_used_it_is_right(worlds: Any, name: str) -> None:
    torch.manual_seed(0)
    plain = Either()
    for rank in range(2):
        for side in SIDES:
            (plain(batch(rank), side) / 2).backward()
    truth = {key: parameter.grad for key, parameter in plain.named_parameters()}
    assert_same_weights(worlds(2).run(each_its_own, name, SHARDING[name], True)[0], truth, 1e-5)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *((name, {}) for name in ("ddp", "fsdp", "fsdp_cpu_offload", "hsdp", "tp", "deepspeed")),
        ("deepspeed_stage_1", {"overlap_comm": False}),
    ],
)
def test_what_only_some_ranks_use_is_trained(
    worlds: Any, name: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    torch.manual_seed(0)
    plain = Either()
    for rank in range(2):
        (plain(batch(rank), SIDES[rank]) / 2).backward()
    truth = {key: parameter.grad for key, parameter in plain.named_parameters()}
    options = SHARDING.get(name, {"find_unused_parameters": True}) | given
    found = worlds(2).run(each_its_own, name, options, False)
    assert_same_weights(found[0], truth, 1e-5)
