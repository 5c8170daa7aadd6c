from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import torch
from click.testing import CliRunner
from written_checkpoints import write

from shard_core.cli.main import main


@pytest.fixture
def run(tmp_path):
    write(tmp_path / "run", 1, 2, window=torch.ones(3), best=float("inf"), plan={"warm": (1, 2)})
    return tmp_path / "run"


def _inspect(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, ["checkpoint", "inspect", *map(str, arguments)])


def _lines(result):
    return {" ".join(line.split()) for line in result.stdout.splitlines()}


def test_the_card_says_what_people_ask(run):
    result = _inspect(run / "step-2")
    assert result.exit_code == 0
    lines = _lines(result)
    assert {
        str(run / "step-2"),
        "step 2",
        "by single on 1 rank",
        "precision 32-true",
        "weights and buffers 2 tensors (2 F32), 20 elements, 80 B",
        "optimizer state 4 tensors (4 F32), 40 elements, 160 B",
        "tensors among the values 1 tensor (1 F32), 3 elements, 12 B",
        "modules net",
        "tied model.second.weight = model.first.weight",
        "adam AdamW over net, 2 groups",
        "value step 2",
        "value window tensor state.window",
        "value best inf",
        "value plan warm [1, 2]",
    } <= lines
    (group,) = (line for line in lines if line.startswith("group 1 "))
    assert group.startswith("group 1 1 parameter, lr 0.5, betas [0.9, 0.999], eps 1e-08")
    assert "Not read: the elements of the tensors (shard checkpoint verify)." in " ".join(result.stdout.split())
    assert any(line.startswith("saved 20") and line.endswith((" ago", "now")) for line in lines)
    assert "model.first.weight F32 4 x 4 64 B" not in lines
    assert "model.first.weight F32 4 x 4 64 B" in _lines(_inspect(run / "step-2", "--tensors"))


def test_json_is_all_of_it(run):
    card = json.loads(_inspect(run / "step-2", "--json").stdout)
    assert (card["step"], card["world_size"], card["form"], card["modules"]) == (2, 1, "sharded", ["net"])
    assert card["information"]["strategy"] == "single"
    assert card["kinds"]["model"] == {"tensors": 2, "elements": 20, "bytes": 80, "dtypes": {"F32": 2}}
    assert card["optimizers"]["adam"]["groups"][1]["hyper_parameters"]["lr"] == 0.5
    assert card["values"] == {"step": 2, "window": "tensor state.window", "best": "inf", "plan": {"warm": [1, 2]}}
    assert card["bytes"] == sum(path.stat().st_size for path in run.glob("step-2/*.safetensors"))
    assert 0 <= card["age"] < 3600
    assert abs(card["created"] + card["age"] - time.time()) < 3600
    assert card["integrity"]["problems"] == []
    assert "tensors" not in card
    tensors = json.loads(_inspect(run / "step-2", "--json", "--tensors").stdout)["tensors"]
    assert {"key": "model.first.weight", "dtype": "F32", "shape": [4, 4]} in tensors
    random = [tensor for tensor in tensors if tensor["key"].startswith("state.shard_random.")]
    assert random
    assert len(tensors) == 7 + len(random)


def test_cheap_checks_find_what_is_missing_truncated_or_overwritten(run):
    path = run / "step-2" / "model-00000-of-00001.safetensors"
    raw = path.read_bytes()
    for change, expected in [
        (raw[:-1], f"has {len(raw) - 1} bytes, but {len(raw)} were committed"),
        (raw[:8] + b"X" + raw[9:], f"the header of '{path.name}' is not the one that was written"),
        (None, "cannot be opened as a file of a checkpoint"),
    ]:
        path.unlink()
        if change is not None:
            path.write_bytes(change)
        result = _inspect(run / "step-2", "--json")
        assert result.exit_code == 1
        (problem,) = json.loads(result.stdout)["integrity"]["problems"]
        assert expected in problem
        if change is None:
            path.touch()
    index = run / "step-1" / "index.safetensors"
    index.write_bytes(index.read_bytes()[:-1] + b"X")
    result = _inspect(run / "step-1")
    assert result.exit_code == 1
    assert any(line.startswith("damaged the index of chunks") for line in _lines(result))


def test_a_run_is_listed_with_what_died_in_it(run):
    died = run / "step-3"
    died.mkdir()
    (died / "optim-00000-of-00002.safetensors").write_bytes(b"cut short")
    (run / "step-1" / "part-00000-of-00001-0123456789ab.safetensors").write_bytes(b"")
    (run / "step-1" / "notes.txt").write_text("mine")
    (run / "logs").mkdir()
    (run / "logs" / "events").write_text("not a checkpoint")
    result = _inspect(run)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == f"{run} holds 3 folders that saves have made:"
    rows = {line.split()[0]: line for line in lines if line.startswith("step-")}
    assert list(rows) == ["step-1", "step-2", "step-3"]
    assert rows["step-1"].endswith("committed 1 file of dead saves, 1 foreign file")
    assert rows["step-2"].split()[:2] == ["step-2", "2"]
    assert rows["step-3"].endswith("9 B not committed")
    listed = {each["path"]: each for each in json.loads(_inspect(run, "--json").stdout)["checkpoints"]}
    assert [each["standing"] for each in listed.values()] == ["committed", "committed", "not committed"]
    assert listed[str(run / "step-2")]["step"] == 2
    assert listed[str(run / "step-1")]["foreign"] == ["notes.txt"]

    (run / "step-2" / "manifest.json").write_bytes(b'{"format": "shard-checkpoint"')
    result = _inspect(run)
    assert result.exit_code == 1
    assert "damaged" in result.stdout
    assert _inspect(run / "step-2").exit_code == 1


def test_what_is_no_checkpoint_is_unusable(run, tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nowhere", tmp_path / "empty", run / "step-2" / "manifest.json"):
        result = _inspect(path)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"Error: '{path}' ")
    result = _inspect(run, "--tensors")
    assert result.exit_code == 2
    assert "give --tensors the path of one" in result.stderr


def test_the_verbs_themselves_are_read_without_torch():
    program = (
        "import sys; from shard_core.cli.checkpoint import command; assert len(command.commands) == 5\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_inspecting_and_pruning_need_no_torch(run):
    program = (
        "import sys; from shard_core.cli.main import main\n"
        f"main(['checkpoint', 'inspect', {str(run / 'step-1')!r}], standalone_mode=False)\n"
        f"main(['checkpoint', 'prune', {str(run)!r}, '--keep-last', '1', '--yes'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, stdout=subprocess.DEVNULL)
    assert [path.name for path in run.iterdir()] == ["step-2"]
