from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from written_checkpoints import write

from shard_core.cli.main import main


@pytest.fixture
def run(tmp_path):
    write(tmp_path / "run", 1, 2)
    return tmp_path / "run"


def _compare(*arguments):
    return CliRunner().invoke(main, ["checkpoint", "compare", *map(str, arguments)])


def test_the_same_training_leaves_the_same(run, tmp_path):
    write(tmp_path / "again", 2)
    result = _compare(run / "step-2", tmp_path / "again" / "step-2")
    same = f"{run / 'step-2'} and {tmp_path / 'again' / 'step-2'} hold the same (6 tensors, 240 B).\n"
    assert (result.exit_code, result.output) == (0, same)
    result = _compare(run / "step-2", tmp_path / "again" / "step-2", "--tolerance", "0.5", "--json")
    card = json.loads(result.stdout)
    assert (card["same"], card["differences"], card["tolerance"]) == (True, [], 0.5)


def test_every_difference_is_named(run):
    result = _compare(run / "step-1", run / "step-2")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        f"first:  {run / 'step-1'}",
        f"second: {run / 'step-2'}",
        "8 differences (6 tensors, 240 B in both):",
    ]
    assert sum(line.startswith("- elements ") for line in lines) == 6
    assert lines[-2:] == [
        "- optimizer adam step: 1.0 against 2.0, of 'first.bias', 'first.weight'",
        "- value step: 1 against 2",
    ]
    card = json.loads(_compare(run / "step-1", run / "step-2", "--json").stdout)
    assert not card["same"]
    assert [each["kind"] for each in card["differences"]] == ["elements"] * 6 + ["optimizer", "value"]
    (weight,) = (each for each in card["differences"] if each["name"] == "model.first.weight")
    assert weight["elements"]["elements"] == 16
    assert 0 < weight["elements"]["relative"] < 1
    assert _compare(run / "step-1", run / "step-2", "--tolerance", "100").exit_code == 0


def test_arguments_that_cannot_be_used(run):
    for arguments in [(run / "step-1", run / "step-9"), (run, run / "step-1"), (run / "step-1",)]:
        result = _compare(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
    assert _compare(run / "step-1", run / "step-2", "--tolerance", "-1").exit_code == 2
