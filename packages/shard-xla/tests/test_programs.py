"""Random training programs show no defect: on two ranks, and in one process whose tensors are spread over four devices.

Compiling takes most of the time, so that every run has a few of them and the long one many.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from xla_environments import HASTY, spread_over

STRATEGIES = pytest.mark.parametrize(
    ("strategy", "environment"), [("xla_fsdp", HASTY), ("xla_spmd", spread_over(4))], ids=["xla_fsdp", "xla_spmd"]
)

TO_REFUSE = {"xla_fsdp": 3, "xla_spmd": 0}
"""How many of the kept programs each is to refuse; their names begin with ``refused``."""


@STRATEGIES
def test_programs_are_right(strategy: str, environment: Mapping[str, str], tmp_path: Path) -> None:
    check(strategy, environment, tmp_path, count=5, seed=30)  # of the first five xla_fsdp refuses three, by chance


@pytest.mark.long
@pytest.mark.timeout(7200)
@STRATEGIES
def test_many_programs_are_right(strategy: str, environment: Mapping[str, str], tmp_path: Path) -> None:
    check(strategy, environment, tmp_path, count=300, seed=1_000)


def check(strategy: str, environment: Mapping[str, str], folder: Path, *, count: int, seed: int) -> None:
    """Run the kept programs and random ones: none may show a defect, and of ten one may be refused, of few two."""
    command = [sys.executable, "-m", "shard_core.testing", strategy, "--json"]
    more = ["--programs", str(count), "--seed", str(seed)]
    ran = subprocess.run(
        [*command, *more], env={**os.environ, **environment}, cwd=folder, capture_output=True, text=True, check=False
    )
    assert ran.returncode in (0, 1), ran.stderr
    report = json.loads(ran.stdout)
    defect = report["defect"]
    assert defect is None, f"{defect['text']}\n{defect['script']}"
    assert report["verdicts"]["refused"] - TO_REFUSE[strategy] <= max(2, count // 10), report["refusals"]
