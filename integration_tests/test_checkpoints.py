"""A checkpoint of one strategy and world size goes on under any other, bit for bit."""

import json
from pathlib import Path
from typing import Any

import leg as legs
import pytest
import torch
from environments import python_with, run, succeed
from leg import STEPS, Leg, Notes, assert_nothing_changed

from shard_core import get_strategy
from shard_core.testing.oracle import assert_same_numbers

LEGS = [("fsdp", 2), ("ddp", 3), ("single", 1), ("fsdp", 3), ("ddp", 2), ("fsdp", 1), ("fsdp", 2)]

SPLIT = {"blocks.*.expand": "colwise", "blocks.*.contract": "rowwise"}
JOURNEY: list[tuple[str, dict[str, Any]]] = [
    ("fsdp", {"devices": 2}),
    ("deepspeed_stage_3", {"devices": 3}),
    ("tp", {"devices": 4, "tensor_parallel_size": 2, "plan": SPLIT}),
    ("xla_fsdp", {"devices": 3, "collectives": "host"}),
    ("deepspeed_stage_1", {"devices": 2}),
    ("xla_spmd", {"virtual_devices": 4}),
    ("ddp", {"devices": 2}),
    ("single", {}),
]


def go(strategy_name: str, leg: Leg) -> Notes:
    """Go a leg in a running world."""
    with get_strategy(strategy_name) as strategy:
        return legs.go(strategy, leg)


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_ring_through_all_strategies(worlds: Any, tmp_path: Path, form: str) -> None:
    """Each leg loads what the leg before saved, has its very bits, and goes on as if never interrupted."""
    uninterrupted = worlds(1).run(go, "single", Leg(steps=STEPS * len(LEGS)))[0].losses
    losses: list[float] = []
    saved: dict[str, torch.Tensor] = {}
    for number, (strategy, size) in enumerate(LEGS):
        load = tmp_path / f"leg-{number - 1}" if number else None
        leg = Leg(seed=number, load=load, save=tmp_path / f"leg-{number}", first=number * STEPS, form=form)
        notes = worlds(size).run(go, strategy, leg)[0]
        if load is not None:
            assert notes.step == number * STEPS
            assert_nothing_changed(notes.loaded, saved, f"{strategy} at {size}")
        saved = notes.left
        losses += notes.losses
    assert_same_numbers("loss", losses, uninterrupted, 2e-6)


@pytest.mark.timeout(900)
def test_journey_through_all_engines_and_environments(worlds: Any, tmp_path: Path) -> None:
    """Unlike engines, and environments with unlike versions of torch, read one another's checkpoints."""
    uninterrupted = worlds(1).run(go, "single", Leg(steps=STEPS * len(JOURNEY)))[0].losses
    losses: list[float] = []
    saved: dict[str, torch.Tensor] = {}
    for number, (strategy, options) in enumerate(JOURNEY):
        arguments = ["--save", f"{tmp_path / str(number)}", "--notes", f"{tmp_path / 'notes.pt'}"]
        arguments += ["--load", f"{tmp_path / str(number - 1)}"] if number else []
        arguments += ["--first", str(number * STEPS), "--options", json.dumps(options)]
        succeed(run(tmp_path, str(python_with(strategy)), legs.__file__, strategy, *arguments))
        notes = Notes(**torch.load(tmp_path / "notes.pt", weights_only=True))
        if number:
            assert notes.step == number * STEPS
            assert_nothing_changed(notes.loaded, saved, f"{strategy} with {options}")
        saved = notes.left
        losses += notes.losses
    assert_same_numbers("loss", losses, uninterrupted, 2e-6)
