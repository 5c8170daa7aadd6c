"""Checkpoints of engines that step copies of another dtype load where the user asks for a cast, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shard_core import get_strategy
from shard_core.errors import CheckpointMismatch
from shard_core.testing import models, set_up, step, whole_weights

#: In "bf16-true" every second steps float32 copies.
STATIONS = ["ddp", "deepspeed_stage_3", "fsdp", "deepspeed_stage_1", "tp"]
_OPTIONS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_size": 1, "plan": {}},
    "deepspeed_stage_3": {"param_persistence_threshold": 0},
}


def bfloat16_batch() -> tuple[torch.Tensor, ...]:
    return tuple(each.bfloat16() for each in models.batches("plain", 1, 8)[0])


def go_on(name: str, load: Path | None, save: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Load, which is refused until a cast is asked for, and go on; return the refusal, what was loaded, what saved."""
    with get_strategy(name, precision="bf16-true", **_OPTIONS.get(name, {})) as strategy:
        model, optimizer = set_up(strategy, "plain", "adamw")
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        refusal = ""
        before = whole_weights(strategy, model)
        if load is not None:
            with pytest.raises(CheckpointMismatch) as error:
                strategy.load_checkpoint(load, state)
            refusal = str(error.value)
            torch.testing.assert_close(whole_weights(strategy, model), before, rtol=0, atol=0)
            assert strategy.load_checkpoint(load, state, cast=True) == {}
        loaded = everything(strategy, model, optimizer)
        step(strategy, model, optimizer, bfloat16_batch())
        strategy.save_checkpoint(save, state)
        return refusal, loaded, everything(strategy, model, optimizer)


def everything(strategy: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    moments = strategy.broadcast(strategy.optimizer_state_dict(optimizer))["state"]
    slots = {f"{key}.{slot}": value for key, each in moments.items() for slot, value in each.items()}
    return {**whole_weights(strategy, model), **slots}


def test_training_goes_on_between_engines_that_step_other_dtypes(
    worlds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    saved: dict[str, Any] = {}
    for number, name in enumerate(STATIONS):
        load = tmp_path / str(number - 1) if number else None
        found = worlds(2).run(go_on, name, load, tmp_path / str(number), timeout=120)
        for refusal, loaded, _ in found:
            if number:
                assert "cast=True converts it" in refusal
                assert loaded.keys() == saved.keys()
                for key, value in saved.items():
                    assert torch.equal(loaded[key], value.to(loaded[key].dtype)), key
        saved = found[0][2]


def overflow(folder: Path) -> None:
    with get_strategy("ddp", precision="32-true") as strategy:
        model = strategy.setup_module(torch.nn.Linear(2, 2))
        with torch.no_grad():
            strategy.unwrap(model).bias.fill_(torch.finfo(torch.float32).max)
        strategy.save_checkpoint(folder, {"model": model})
    with get_strategy("fsdp", precision="bf16-true") as strategy:
        model = strategy.setup_module(torch.nn.Linear(2, 2))
        before = whole_weights(strategy, model)
        with pytest.raises(CheckpointMismatch, match="too large for bfloat16"):
            strategy.load_checkpoint(folder, {"model": model}, cast=True)
        torch.testing.assert_close(whole_weights(strategy, model), before, rtol=0, atol=0)


def test_numbers_that_a_cast_would_lose_are_refused(worlds: Any, tmp_path: Path) -> None:
    worlds(2).run(overflow, tmp_path / "saved")
