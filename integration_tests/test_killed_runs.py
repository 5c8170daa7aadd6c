"""Runs that are killed while they save leave the checkpoint that was there, or the new one as a whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STRATEGIES = ("ddp", "fsdp", "tp", "deepspeed_stage_2")


def _kill(folder: Path, kills: int) -> None:
    script = Path(__file__).with_name("killed_runs.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(kills), "0", *STRATEGIES],
        capture_output=True,
        text=True,
        timeout=60 + 20 * kills,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert all(sum(found.values()) == kills // len(STRATEGIES) for found in counts.values())
    assert sum(found["old"] + found["none"] for found in counts.values()) > 0  # else all came too late


@pytest.mark.long
@pytest.mark.timeout(11000)
def test_runs_that_are_killed_at_random_moments(tmp_path: Path) -> None:
    _kill(tmp_path, int(os.environ.get("SHARD_KILLS", "500")))
