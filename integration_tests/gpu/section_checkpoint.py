"""Saving 4 GB from the device to disk and loading them, beside ``torch.save`` and torch's distributed checkpoint."""

from __future__ import annotations

import functools
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
from loops import Ours, adamw, started
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

WIDTH, LAYERS, ROUNDS, COPIES = 2048, 80, 3, 5
BLOCKED = "async save: ours, blocked"


def cases() -> list[Case]:
    """List the cases."""
    return [Case("fsdp", saves, 60)]


def saves(machine: Machine) -> dict[str, Any]:
    """Save, load and save in the background, in rounds that take turns; what is loaded must be what was saved."""
    width, layers, rounds = (32, 2, 1) if machine.quick else (WIDTH, LAYERS, ROUNDS)
    gigabytes = 12 * width * width * layers / 1e9  # a weight and two moments
    if shutil.disk_usage(tempfile.gettempdir()).free < COPIES * gigabytes * 1e9:
        raise Skipped(f"there are no {COPIES * gigabytes:.0f} GB free for temporary files")
    with started("fsdp", machine) as strategy, tempfile.TemporaryDirectory() as folder:
        with torch.device(machine.device):
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        loop = Ours(strategy, model, adamw)
        inputs = torch.randn(8, width, device=machine.device)
        seconds: dict[str, list[float]] = {}
        for number in range(rounds):
            _round(loop, functools.partial(loop.step, inputs), Path(folder, str(number)), seconds, machine)
            shutil.rmtree(Path(folder, str(number)))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "gigabytes": gigabytes,
        "rounds": rounds,
        "seconds": medians,
        "blocked_ms_per_gb": medians[BLOCKED] * 1000 / gigabytes,
        "first_blocked_ms_per_gb": seconds[BLOCKED][0] * 1000 / gigabytes,
        "blocked_share_of_a_save": medians[BLOCKED] / medians["save: ours"],
    }


def _round(loop: Ours, train: Any, place: Path, seconds: dict[str, list[float]], machine: Machine) -> None:
    strategy, state = loop.strategy, {"model": loop.model, "optimizer": loop.optimizer}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        train()
        machine.synchronize()
        began = time.perf_counter()
        result = call()
        machine.synchronize()
        seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    def theirs() -> dict[str, Any]:
        weights, slots = get_state_dict(strategy.unwrap(loop.model), loop.optimizer)
        return {"model": weights, "optimizer": slots}

    def torch_save() -> None:
        with (place / "torch.pt").open("wb") as file:
            torch.save(theirs(), file)
            os.fsync(file.fileno())

    def shards() -> list[torch.Tensor]:
        parts: list[Any] = list(loop.model.parameters())
        return [each.to_local().detach().clone() for each in parts]

    place.mkdir()
    timed("save: torch.save, fsync", torch_save)
    timed("save: DCP", lambda: dcp.save(theirs(), checkpoint_id=place / "dcp"))
    timed("save: ours", lambda: strategy.save_checkpoint(place / "ours", state))
    saved = shards()
    timed("load: DCP, unverified", lambda: dcp.load(theirs(), checkpoint_id=place / "dcp"))
    timed("load: ours, verified", lambda: strategy.load_checkpoint(place / "ours", dict(state)))
    if not all(map(torch.equal, saved, shards())):
        raise Failed("what was loaded is not what was saved")
    handle = timed(BLOCKED, lambda: strategy.save_checkpoint(place / "behind", state, blocking=False))
    timed("async save: ours, the rest", handle.wait)
    future = timed("async save: DCP, blocked", lambda: dcp.async_save(theirs(), checkpoint_id=place / "dcp-behind"))
    timed("async save: DCP, the rest", future.result)
