"""One checkpoint goes through every layout and back: split by rows or elements, sharded over devices, whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from xla_environments import HASTY, spread_over

from shard_core import get_strategy
from shard_core.testing import bits, set_up, step

Bits = dict[str, torch.Tensor]

ELEMENTS = {"shard_param_on_dim_0": False}

RING: tuple[tuple[str, dict[str, Any], int, dict[str, str]], ...] = (
    ("xla_fsdp", {}, 3, HASTY),
    ("xla_spmd", {}, 1, spread_over(4)),
    ("ddp", {}, 2, {}),
    ("xla_fsdp", ELEMENTS, 3, HASTY),
    ("single", {}, 1, {}),
    ("xla_fsdp", {}, 2, HASTY),
    ("xla_fsdp", ELEMENTS, 2, HASTY),
)


def two_groups(module: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in module.parameters() if p.requires_grad and p.ndim < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": others, "lr": 0.02}], lr=0.01)


def leg(
    name: str, options: dict[str, Any], load: Path | None, save: Path, first: int
) -> tuple[Bits, Bits, list[float], list[Any]]:
    """Load what the leg before saved, look at it, go on for two steps, and save."""
    with get_strategy(name, accelerator="cpu" if name in ("ddp", "single") else "xla", **options) as strategy:
        model, optimizer = set_up(strategy, bits.Assorted, two_groups, seed=0 if load is None else 1)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if load is not None:
            strategy.load_checkpoint(load, state)
        before = bits.bits_of(strategy, model, optimizer)
        losses = [step(strategy, model, optimizer, batch) for batch in bits.samples(2 * len(RING))[first : first + 2]]
        strategy.save_checkpoint(save, state)
        groups = [[group["lr"], group["weight_decay"]] for group in optimizer.param_groups]
        return before, bits.bits_of(strategy, model, optimizer), losses, groups


def plain_losses() -> list[float]:
    torch.manual_seed(0)
    model = bits.Assorted()
    optimizer = two_groups(model)
    losses = []
    for batch in bits.samples(2 * len(RING)):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.long
def test_a_ring_through_every_layout(worlds: Any, tmp_path: Path) -> None:
    losses: list[float] = []
    saved: Bits = {}
    for number, (name, options, size, environment) in enumerate(RING):
        load = tmp_path / str(number - 1) if number else None
        arguments = name, options, load, tmp_path / str(number), 2 * number
        answers = worlds(size, environment).run(leg, *arguments, timeout=240)
        found, after, its_losses, groups = answers[0]
        if number:
            bits.assert_same_bits(f"after hop {number} to {name} at {size}", found, saved)
        assert groups == [[0.01, 0.3], [0.02, 0.01]]
        assert torch.equal(after.get("model.again.weight", after["model.middle.weight"]), after["model.middle.weight"])
        saved, losses = after, losses + its_losses
    for mine, truth in zip(losses, plain_losses(), strict=True):
        assert abs(mine - truth) <= 2e-6 * abs(truth)


def local_boxes(options: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    with get_strategy("xla_fsdp", accelerator="xla", **options) as strategy:
        model = strategy.setup_module(nn.Linear(20, 31))
        return [(name, tuple(part.shape)) for name, part in strategy.module_state_dict(model, full=False).items()]


def test_a_rank_lists_each_of_its_boxes(worlds: Any) -> None:
    first, second = worlds(2, HASTY).run(local_boxes, {})
    # 31 rows: 16 on the first rank, and on the second what is left.
    assert first == [("weight", (16, 20)), ("bias", (16,))]
    assert second == [("weight", (15, 20)), ("bias", (15,))]
    first, second = worlds(2, HASTY).run(local_boxes, ELEMENTS)
    # 620 elements: 384 on the first rank, and on the second what is left.
    assert first == [("weight[0:19,0:20]", (19, 20)), ("weight[19:20,0:4]", (1, 4)), ("bias", (31,))]
    assert second == [("weight[19:20,4:20]", (1, 16)), ("weight[20:31,0:20]", (11, 20)), ("bias", (0,))]
