"""Saving 4 GB from the device to disk and loading them, beside ``torch.save`` and torch's distributed checkpoint."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from cases import Case, Failed, Machine, Skipped
from section_step import free
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from shard_core import get_strategy

WIDTH, LAYERS, ROUNDS = 2048, 80, 3
COPIES = 5


def cases(machine: Machine) -> list[Case]:
    """List the cases."""
    del machine
    return [Case("fsdp", saves, 90)]


def saves(machine: Machine) -> dict[str, Any]:
    """Save, load and save in the background, in rounds that take turns; what is loaded must be what was saved."""
    width, layers, rounds = (32, 2, 1) if machine.quick else (WIDTH, LAYERS, ROUNDS)
    size = 12 * width * width * layers
    if shutil.disk_usage(tempfile.gettempdir()).free < COPIES * size:
        raise Skipped(f"there are no {COPIES * size / 1e9:.0f} GB free for temporary files")
    strategy = get_strategy("fsdp", accelerator=machine.device, devices=1)
    strategy.setup_environment()
    try:
        with tempfile.TemporaryDirectory() as folder:
            seconds = _rounds(strategy, Path(folder), width, layers, rounds, machine)
    finally:
        strategy.teardown()
        free(machine)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    figures: dict[str, Any] = {"gigabytes": size / 1e9, "rounds": rounds, "seconds": medians}
    blocked = "save in the background: ours, blocked"
    figures["blocked_ms_per_gb"] = medians[blocked] * 1000 / (size / 1e9)
    figures["first_blocked_ms_per_gb"] = seconds[blocked][0] * 1000 / (size / 1e9)
    figures["blocked_share_of_a_save"] = medians[blocked] / medians["save: ours"]
    return figures


def _rounds(
    strategy: Any, folder: Path, width: int, layers: int, rounds: int, machine: Machine
) -> dict[str, list[float]]:
    with torch.device(machine.device):
        model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
    inputs = torch.randn(8, width, device=machine.device)
    state = {"model": model, "optimizer": optimizer}

    def train() -> None:
        strategy.backward(model(inputs).square().mean(), model)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()

    def theirs() -> dict[str, Any]:
        weights, slots = get_state_dict(strategy.unwrap(model), optimizer)
        return {"model": weights, "optimizer": slots}

    train()
    seconds: dict[str, list[float]] = {}
    for number in range(rounds):
        place = folder / str(number)
        place.mkdir()

        def timed(name: str, call: Callable[[], Any]) -> Any:
            machine.synchronize()
            began = time.perf_counter()
            result = call()
            machine.synchronize()
            seconds.setdefault(name, []).append(time.perf_counter() - began)
            return result

        timed("save: torch.save and fsync", lambda: _torch_save(theirs(), place / "torch.pt"))  # noqa: B023
        timed("save: DCP", lambda: dcp.save(theirs(), checkpoint_id=place / "dcp"))  # noqa: B023
        timed("save: ours", lambda: strategy.save_checkpoint(place / "ours", state))  # noqa: B023
        saved = [each.detach().clone() for each in _shards(model)]
        train()
        timed("load: DCP, unverified", lambda: dcp.load(theirs(), checkpoint_id=place / "dcp"))  # noqa: B023
        train()
        timed("load: ours, verified", lambda: strategy.load_checkpoint(place / "ours", dict(state)))  # noqa: B023
        if not all(map(torch.equal, saved, _shards(model))):
            raise Failed("what was loaded is not what was saved")
        del saved
        handle = timed(
            "save in the background: ours, blocked",
            lambda: strategy.save_checkpoint(place / "behind", state, blocking=False),  # noqa: B023
        )
        train()
        timed("save in the background: ours, the rest", handle.wait)
        future = timed(
            "save in the background: DCP, blocked",
            lambda: dcp.async_save(theirs(), checkpoint_id=place / "dcp-behind"),  # noqa: B023
        )
        train()
        future.result()
        shutil.rmtree(place)
    return seconds


def _torch_save(values: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())


def _shards(model: nn.Module) -> list[torch.Tensor]:
    parts: list[Any] = list(model.parameters())
    return [each.to_local() for each in parts]
