"""Random training programs show no defect under any strategy of this environment."""

from __future__ import annotations

from typing import Any

import pytest

from shard_core.testing.programs.campaign import campaign
from shard_core.testing.programs.kept import kept_programs

EVERY_RUN = {
    "ddp": 60,
    "fsdp": 60,
    "tp": 60,
    "deepspeed_stage_2": 60,
    "single": 10,
    "hsdp": 10,
    "fsdp_cpu_offload": 10,
    "deepspeed_stage_1": 10,
    "deepspeed_stage_3": 10,
    "deepspeed": 10,
}
"""How many programs each strategy is given in every run, at two ranks, with those that come with the kit.

In the long one ten times as many are drawn, or 400: from so many on it is judged whether memory grows.
"""
DRAWN_AT_LEAST = 5
MOST_REFUSED = {"deepspeed_stage_3": 0.13, "deepspeed": 0.13}
"""Which share of 400 programs may be refused, if more than a tenth: stage 3 lets go of what penalties read."""
CASES = [(strategy, size) for strategy in EVERY_RUN for size in (1, 2, 3) if size == 1 or strategy != "single"]
CASES += [("tp", 4), ("hsdp", 4)]  # two times two


@pytest.mark.parametrize("strategy", EVERY_RUN)
def test_programs_are_right(worlds: Any, strategy: str) -> None:
    kept = sum(program.strategy == strategy for program in kept_programs().values())
    drawn = max(EVERY_RUN[strategy] - kept, DRAWN_AT_LEAST)
    check(worlds, strategy, 1 if strategy == "single" else 2, drawn, seed=0)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("strategy", "size"),
    [case for case in CASES if case != ("tp", 3)],  # layers of the models cannot be split over three ranks
)
def test_many_programs_are_right(worlds: Any, strategy: str, size: int) -> None:
    count = max(10 * EVERY_RUN[strategy], 400) if size == 2 else 30
    refused = check(worlds, strategy, size, count, seed=10_000 * size)
    most = MOST_REFUSED.get(strategy, 0.1)
    assert refused <= (most if count >= 400 else max(0.15, 2 * most - 0.05))  # of few programs chance refuses more


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", [strategy for strategy in EVERY_RUN if strategy not in ("single", "tp")])
def test_programs_go_on_with_other_numbers_of_ranks(worlds: Any, strategy: str) -> None:
    check(worlds, strategy, 2, 50, seed=50_000, sizes=(1, 2, 3, 4))


def check(worlds: Any, strategy: str, size: int, count: int, seed: int, sizes: tuple[int, ...] = ()) -> float:
    """Run programs, of which none may show a defect, no rank may keep memory, and a third at most may be refused.

    Returns:
        The share of those that were.
    """
    report = campaign(strategy, count=count, seed=seed, world_size=size, sizes=sizes, worlds=worlds)
    assert report.defect is None, f"{report.defect.judgement.text}\n{report.defect.script}"
    assert not report.grows, f"a rank keeps {report.growth} bytes of each program"
    refused = report.verdicts["refused"] / report.count
    assert refused < 1 / 3
    return refused
