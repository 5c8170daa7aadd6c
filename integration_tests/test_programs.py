"""Random training programs show no defect under any strategy of this environment, at two and at three ranks."""

from __future__ import annotations

from typing import Any

import pytest

from shard_core.testing.programs.campaign import campaign

COUNTS = {
    "ddp": 60,
    "fsdp": 60,
    "tp": 60,
    "deepspeed_stage_2": 60,
    "deepspeed_stage_1": 30,
    "deepspeed_stage_3": 30,
    "hsdp": 30,
    "fsdp_cpu_offload": 30,
}


CASES = [(strategy, size) for strategy in COUNTS for size in (2, 3) if (strategy, size) != ("tp", 3)]
"""Layers of the models cannot be split over three ranks."""


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "size"), CASES)
def test_programs_are_right(worlds: Any, strategy: str, size: int) -> None:
    report = campaign(strategy, count=COUNTS[strategy], seed=10_000 * size, world_size=size, worlds=worlds)
    assert report.defect is None, f"{report.defect.judgement.text}\n{report.defect.script}"
    assert report.verdicts["equal"] > COUNTS[strategy] / 3
