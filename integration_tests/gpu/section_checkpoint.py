"""Saving 4 GB from the device to disk and loading them, beside raw writes and torch's distributed checkpoint."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from cases import Case, Machine, Skipped, started
from checkpoint_speed import compare

MEGABYTES, WIDTH, ROUNDS, COPIES = 4000, 2048, 3, 5


def cases() -> list[Case]:
    """List the cases."""
    return [Case("fsdp", saves, 120)]


def saves(machine: Machine) -> dict[str, Any]:
    """Run the benchmark of checkpoints, which sees that each load brings back what was there."""
    megabytes, width, rounds = (0.1, 32, 1) if machine.quick else (MEGABYTES, WIDTH, ROUNDS)
    if shutil.disk_usage(tempfile.gettempdir()).free < COPIES * megabytes * 1e6:
        raise Skipped(f"there are no {COPIES * megabytes / 1000:.0f} GB free for temporary files")
    with started("fsdp", machine) as strategy, tempfile.TemporaryDirectory() as folder:
        found, size = compare(strategy, Path(folder), megabytes, rounds, width)
    seconds = {name: statistics.median(each for each, _ in runs) for name, runs in found.items()}
    blocked = seconds["save in the background: ours, until training goes on"]
    figures = {"gigabytes": size / 1e9, "rounds": rounds, "seconds": seconds}
    figures["blocked_ms_per_gb"] = blocked * 1e12 / size
    return figures | {"blocked_share_of_a_save": blocked / seconds["save: ours"]}
