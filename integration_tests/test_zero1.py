"""A backend as a stranger writes it, ZeRO stage 1 over whole parameters: short, and through the faces alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from environments import ROOT, SETTINGS
from faces import FACES, WITHOUT_TORCH, imports_of

PROJECT = ROOT / "integration_tests" / "zero1"
PACKAGE = PROJECT / "src" / "shard_zero1"
MOST_LINES = 150
#: What an author's own layout of optimizer state would break first: what a gradient is, a step, what is kept.
CHOSEN = (
    *("averages_gradients", "optimizer_state_moves_along", "schedulers_count_steps_once", "norm_is_global_and_alike"),
    *("round_trip_is_bitwise", "moments_come_back", "state_dicts_are_whole", "loads_at_another_world_size"),
    *("steps_are_counted_for_each_parameter", "filter_keeps_what_it_names"),
)


@pytest.fixture
def installed(tmp_path) -> Path:
    """Return a folder in which Python finds the example installed, with its test of conformance."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "shard_zero1-1.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        + "".join(f"Requires-Dist: {each}\n" for each in project["dependencies"])
    )
    entries = project["entry-points"]["shard.strategies"].items()
    (info / "entry_points.txt").write_text("[shard.strategies]\n" + "".join(f"{a} = {b}\n" for a, b in entries))
    shutil.copy(PROJECT / "tests" / "test_conformance.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def judge(folder: Path, *arguments: str, seconds: float) -> str:
    """Run the example's own test of conformance, and return what it prints."""
    paths = (str(folder), str(PROJECT / "src"), *filter(None, [os.environ.get("PYTHONPATH")]))
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_conformance.py", *arguments)
    environment = os.environ | SETTINGS | {"PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_example_is_short_and_imports_faces_alone():
    files = [PACKAGE / f"{name}.py" for name in ("config", "plugin", "strategy")]
    assert sum(len(file.read_text().splitlines()) for file in files) < MOST_LINES
    for file in files:
        allowed = FACES if file.stem == "strategy" else WITHOUT_TORCH
        assert {module for module, _ in imports_of(file) if module.split(".")[0] == "shard_core"} <= set(allowed)


@pytest.mark.long
@pytest.mark.timeout(280)
def test_the_example_keeps_what_its_layout_puts_at_risk(installed):
    output = judge(installed, "-k", f"2ranks and ({' or '.join(CHOSEN)})", seconds=270)
    assert f"{len(CHOSEN)} of" in output


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_example_keeps_the_whole_contract(installed):
    judge(installed, seconds=3500)
