from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.scripts import environment


def _sweep(folder: Path, stride: int, victims: tuple[str, ...], seconds: float) -> dict[str, list[str]]:
    script = Path(__file__).with_name("killed_saves.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(stride), *victims],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    outcome: dict[str, list[str]] = json.loads(done.stdout)
    return outcome


def _assert_old_or_new(outcome: dict[str, list[str]]) -> None:
    for kind, left in outcome.items():
        before = "none" if "fresh" in kind else "old"
        turn = left.index("new")
        assert set(left[:turn]) == {before}, (kind, left)
        assert set(left[turn:]) == {"new"}, (kind, left)


def test_a_save_killed_at_some_operations_leaves_the_old_or_the_new_checkpoint(tmp_path):
    outcome = _sweep(tmp_path, 53, ("all", "0", "1"), seconds=280)
    assert sum(map(len, outcome.values())) > 15
    _assert_old_or_new(outcome)


@pytest.mark.long
@pytest.mark.timeout(1900)
def test_a_save_killed_at_any_operation_leaves_the_old_or_the_new_checkpoint(tmp_path):
    outcome = _sweep(tmp_path, 1, ("all", "0", "1"), seconds=1800)
    assert sum(map(len, outcome.values())) > 400
    _assert_old_or_new(outcome)
