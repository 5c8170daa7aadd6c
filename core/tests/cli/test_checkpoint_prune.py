from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from written_checkpoints import write

from shard_core.checkpoint.inspection.verify import verify
from shard_core.cli.main import main


@pytest.fixture
def run(tmp_path):
    write(tmp_path / "run", 1, 2, 3, 4)
    return tmp_path / "run"


def _prune(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, ["checkpoint", "prune", *map(str, arguments)])


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def _rows(result):
    lines = (" ".join(line.split()) for line in result.stdout.splitlines())
    return {line.split()[0]: line for line in lines if line.startswith("step-")}


def test_old_checkpoints_go_and_the_reason_is_printed(run):
    result = _prune(run, "--keep-last", 1, "--keep-every", 2, "--yes")
    assert result.exit_code == 0
    rows = _rows(result)
    assert rows["step-1"].endswith(" goes older")
    assert rows["step-2"].endswith(" stays every 2 steps")
    assert rows["step-3"].endswith(" goes older")
    assert rows["step-4"].endswith(" stays among the last 1")
    assert "Removed 2 of 2; " in result.stdout
    assert _names(run) == ["step-2", "step-4"]
    assert all(verify(path).is_fine for path in run.iterdir())
    result = _prune(run, "--keep-last", 1, "--keep-every", 2)  # nothing to ask about
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "Nothing to remove.")


def test_nothing_is_removed_unasked(run):
    for arguments in [(), ("--json",)]:
        result = _prune(run, "--keep-last", 1, *arguments)
        assert result.exit_code == 2
        assert result.stderr == (
            f"Error: 3 folders in '{run}' would lose files, and nobody is there to be asked; say --yes to remove them, "
            "or --dry-run to see them.\n"
        )
    card = json.loads(_prune(run, "--keep-last", 1, "--dry-run", "--json").stdout)
    assert [each["removes"] for each in card["entries"]] == ["all", "all", "all", "nothing"]
    assert len(_names(run)) == 4


@pytest.mark.parametrize("answer", ["y", "n"])
def test_on_a_terminal_it_asks(run, answer):
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    program = [sys.executable, "-m", "shard_core", "checkpoint", "prune", str(run), "--keep-last", "1"]
    done = subprocess.run(program, stdin=theirs, capture_output=True, text=True, timeout=120, check=False)
    os.close(ours)
    os.close(theirs)
    assert "Remove them? [y/N]" in done.stderr
    assert (done.returncode == 0, _names(run)) == {
        "y": (True, ["step-4"]),
        "n": (False, ["step-1", "step-2", "step-3", "step-4"]),
    }[answer]


def test_leftovers_go_when_old_or_asked_for_and_foreign_files_stay(run):
    died, mine = run / "step-5", run / "step-6"
    for folder in (died, mine):
        folder.mkdir()
        (folder / "model-00000-of-00002.safetensors").write_bytes(b"cut short")
    (mine / "notes.txt").write_text("mine")
    (run / "step-4" / "manifest.json-0123456789ab").write_bytes(b"{")
    result = _prune(run, "--yes")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "Nothing to remove.")
    assert _rows(result)["step-5"].endswith("stays a save may be under way")
    result = _prune(run, "--yes", "--leftovers")
    assert result.exit_code == 0
    assert _rows(result)["step-5"].endswith("9 B goes a save that died")
    assert _rows(result)["step-6"].endswith("stays holds 'notes.txt', which no save made")
    assert _rows(result)["step-4"].endswith("1 B is cleaned left by a save that died")
    assert _names(run) == ["step-1", "step-2", "step-3", "step-4", "step-6"]
    assert _names(mine) == ["model-00000-of-00002.safetensors", "notes.txt"]
    assert not list(run.glob("step-4/*0123456789ab"))
    assert verify(run / "step-4").is_fine
    for path in (mine / "notes.txt", mine / "model-00000-of-00002.safetensors"):
        os.utime(path, (time.time() - 1e6,) * 2)
    assert _prune(run, "--yes", "--keep-last", 1).exit_code == 0
    assert _names(run) == ["step-4", "step-6"]


def test_the_newest_stays_whatever_its_step(run):
    os.rename(run / "step-4", run / "step-0")
    assert _prune(run, "--keep-every", 1000, "--yes").exit_code == 0
    assert _names(run) == ["step-0"]


def test_arguments_that_cannot_be_used(run, tmp_path):
    for arguments in [(), (tmp_path / "nowhere",), (run, "--keep-last", 0), (run / "step-1" / "manifest.json",)]:
        result = _prune(*arguments, "--yes")
        assert (result.exit_code, result.stdout) == (2, "")
    assert len(_names(run)) == 4
