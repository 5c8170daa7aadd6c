"""``python -m shard_core.testing`` as an author starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from shard_core.errors import RankFailed
from shard_core.testing import Conformance
from shard_core.testing.command import command
from shard_core.testing.programs.kept import kept_programs
from shard_core.testing.programs.program import from_json
from shard_core.testing.programs.settings import LEFT_OPEN, LEFT_OUT
from shard_core.testing.report import reason_of
from shard_core.testing.rules import promises_of

PLUGIN = """
import dataclasses

from shard_core.capability import Capability
from shard_core.plugins import hookimpl
from shard_core.strategies.plugin import SINGLE

@hookimpl
def shard_strategy(name):
    return dataclasses.replace(
        SINGLE,
        name=name,
        factory="doubtful_strategy:Doubtful",
        capabilities=SINGLE.capabilities - {Capability.CLIP_VALUE},
    )
"""
STRATEGY = """
from shard_core.strategies.single import SingleStrategy

class Doubtful(SingleStrategy):
    def backward(self, loss, module, **more):
        super().backward(loss * 2, module, **more)
"""


def kit(*arguments, folder=None, **variables):
    return subprocess.run(
        [sys.executable, "-m", "shard_core.testing", *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture
def doubtful(site):
    """Build an environment with a strategy that doubles gradients and declares one capability less."""
    site.install(
        "shard-doubtful",
        requires=("shard-core>=1,<2",),
        entries={"shard.strategies": {"doubtful": "doubtful_plugin"}},
        modules={"doubtful_plugin": PLUGIN, "doubtful_strategy": STRATEGY},
    )
    return {"PYTHONPATH": str(site.folder)}


def test_promises_are_listed():
    done = kit("--list")
    assert done.returncode == 0, done.stderr
    promises, out, left_open, undrawn = (part.splitlines() for part in done.stdout.split("\n\n"))
    assert len(promises) == len(promises_of(Conformance))
    assert any(line.startswith("training.averages_gradients: ") for line in promises)
    assert out == ["Random programs leave out:", *(f"- {each}" for each in LEFT_OUT)]
    assert left_open == ["Random programs leave to a strategy:", *(f"- {each}" for each in LEFT_OPEN)]
    assert undrawn[0] == "Random programs give no value to these options:"
    assert "- ddp: static_graph" in undrawn


@pytest.mark.long
def test_a_log_shows_signs_of_life():
    done = kit("single", "--world-sizes", "1", "--promise", "trains_like_plain_pytorch")
    assert "cases judged, next: trains_like_plain_pytorch" in done.stderr


@pytest.mark.long
def test_kept_promises_are_status_0_and_json_stands_alone():
    done = kit("single", "--world-sizes", "1", "--promise", "averages_gradients", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{"promise": "training.averages_gradients", "status": "kept", "reason": ""}]


def test_one_fault_is_broken_refused_and_not_judged(doubtful):
    chosen = ("averages_gradients", "training.norm_is_global_and_alike", "options_are_documented")
    arguments = [word for name in chosen for word in ("--promise", name)]
    done = kit("doubtful", *arguments, "--json", **doubtful)
    assert done.returncode == 1, done.stderr
    rows = {row["promise"]: row for row in json.loads(done.stdout)}
    broken = rows["training.averages_gradients"]
    assert broken["status"] == "broken"
    assert broken["reason"].startswith("1ranks: ")
    assert "is the first parameter that differs" in broken["reason"]
    unjudged = rows["training.norm_is_global_and_alike"]
    assert unjudged["status"] == "not judged"
    assert unjudged["reason"] == "it stands on 'averages_gradients', which is broken"
    assert rows["plugin.options_are_documented"] == {
        "promise": "plugin.options_are_documented",
        "status": "kept",
        "reason": "",
    }


@pytest.mark.long
def test_an_undeclared_ability_that_is_refused_is_no_fault(doubtful):
    done = kit("doubtful", "--promise", "clips_by_value", "--json", **doubtful)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        {"promise": "training.clips_by_value", "status": "refused", "reason": "CLIP_VALUE is not declared"}
    ]


@pytest.mark.long
def test_the_table_tells_what_was_promised_found_and_is_usually_wrong(doubtful):
    done = kit("doubtful", "--promise", "averages_gradients", "-v", COLUMNS="200", **doubtful)
    assert done.returncode == 1
    for words in (
        "training.averages_gradients is broken",
        "Promised: A step's gradient is the mean over all data-parallel ranks.",
        "Found: 1ranks: 'first.weight' is the first parameter that differs",
        "Usual cause: Gradients are summed",
        "doubtful on 1 rank: 1 broken.",
    ):
        assert words in done.stdout
    assert "AssertionError" not in done.stdout
    assert "assert_same_weights" in done.stderr


@pytest.mark.long
def test_what_configures_tests_around_here_has_no_say(tmp_path):
    (tmp_path / "conftest.py").write_text("raise RuntimeError('a stranger')")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    before = sorted(tmp_path.rglob("*"))
    promise = ("--promise", "options_are_documented")
    done = kit("single", *promise, folder=tmp_path, PYTEST_ADDOPTS="--nor-this", PYTEST_PLUGINS="nowhere")
    assert done.returncode == 0, done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["dpd"], "did you mean 'ddp'?"),
        (["ddp", "--world-sizes", "1,0"], "'1,0' is no list of world sizes"),
        (["single", "--world-sizes", "2"], "strategy 'single' runs on at most 1 rank"),
        (["ddp", "--option", "bucket_cap=3"], "did you mean 'bucket_cap_mb'?"),
        (["ddp", "--option", "bucket_cap_mb=-3"], "bucket_cap_mb is -3"),
        pytest.param(
            ["ddp", "--device", "cuda"],
            "torch sees no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device"),
        ),
        pytest.param(
            ["ddp", "--programs", "3", "--device", "cuda"],
            "torch sees no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device"),
        ),
        (["ddp", "--programs", "3", "--device", "xla"], "strategy 'ddp' runs on cpu, cuda, not on 'xla'."),
        (["ddp", "--replay", "x.json", "--device", "cuda"], "--device has no meaning with --replay"),
        (["dpd", "--programs", "3"], "did you mean 'ddp'?"),
        (["ddp", "--programs", "0"], "0 is not in the range"),
        (["single", "--programs", "3", "--world-sizes", "2"], "strategy 'single' runs on at most 1 rank"),
        (["ddp", "--programs", "3", "--promise", "averages_gradients"], "--promise has no meaning with --programs"),
        (["ddp", "--programs", "3", "--option", "bucket_cap_mb=3"], "--option has no meaning with --programs"),
        (["ddp", "--programs", "3", "--replay", "x.json"], "--replay has no meaning with --programs"),
        (["ddp", "--seed", "3"], "--seed has no meaning without --programs"),
        (["ddp", "--replay", "no-such.json"], "the program 'no-such.json' cannot be read: No such file"),
        (["ddp", "--replay", "x.json", "--minutes", "3"], "--minutes has no meaning with --replay"),
        (["ddp", "--promise", "averages_gradient"], "did you mean 'averages_gradients'?"),
        (["ddp", "--promise", "plugin.averages_gradients"], "there is no promise 'plugin.averages_gradients'"),
        ([], "Missing argument 'NAME'"),
    ],
)
def test_bad_input_is_a_sentence_and_status_2(arguments, says):
    done = CliRunner().invoke(command, arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr
    assert isinstance(done.exception, SystemExit)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda record: "{", "this is none"),
        (lambda record: record["operations"].append({"operation": "Stop"}), "did you mean 'Step'?"),
        (lambda record: record["operations"].append({"operation": "Load"}), "not legal in plain PyTorch"),
        (lambda record: record["models"][0].update(parts=["lineal"]), "did you mean 'linear'?"),
        (lambda record: record.update(world_size=2), "strategy 'single' runs on at most 1 rank"),
    ],
)
def test_a_file_that_is_no_program_is_a_sentence(change, says, tmp_path):
    record = json.loads(kept_programs()["seed-again"].to_json()) | {"world_size": 1}
    text = change(record) or json.dumps(record)
    file = tmp_path / "program.json"
    file.write_text(text)
    done = CliRunner().invoke(command, ["single", "--replay", str(file)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr


def test_a_ledger_that_is_none_is_a_sentence(tmp_path):
    for text in ("[]", '{"ddp": -1}', "{"):
        file = tmp_path / "ledger.json"
        file.write_text(text)
        done = CliRunner().invoke(command, ["ddp", "--programs", "1", "--ledger", str(file)])
        assert (done.exit_code, done.stdout) == (2, "")
        assert "the ledger" in done.stderr
        assert file.read_text() == text


@pytest.mark.long
def test_programs_go_on_from_seed_to_seed(tmp_path):
    arguments = ("single", "--programs", "2", "--ledger", "ledger.json")
    done = kit(*arguments, "--seed", "40", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "single on 1 rank: 2 programs, no defect; the next seed is 42." in done.stdout
    assert "2 of 2 programs judged, last: seed 41, " in done.stderr
    done = kit(*arguments, "--json", folder=tmp_path)
    report = json.loads(done.stdout)
    assert (report["next_seed"], report["defect"], sum(report["verdicts"].values())) == (44, None, 2)
    assert json.loads((tmp_path / "ledger.json").read_text()) == {"single": 44}


@pytest.mark.long
def test_a_defect_is_shrunk_printed_and_written(doubtful, tmp_path):
    done = kit("doubtful", "--programs", "40", folder=tmp_path, **doubtful)
    assert done.returncode == 1, done.stdout + done.stderr
    (file,) = tmp_path.glob("program-doubtful-*.json")
    program = from_json(file.read_text())
    assert len(program.operations) <= 3
    assert f"--replay {file.name} runs it again" in done.stdout
    assert "def main(show=print_shown, folder='checkpoints'):" in done.stdout
    done = kit("doubtful", "--replay", file.name, "--json", folder=tmp_path, **doubtful)
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (1, "defect")
    done = kit("single", "--replay", file.name, folder=tmp_path, **doubtful)
    assert (done.returncode, done.stdout) == (0, "single on 1 rank: equal.\n")


@pytest.mark.long
def test_programs_need_no_pytest(tmp_path):
    program = (
        "import sys; sys.modules['pytest'] = None; from shard_core.testing.command import command; "
        "command(['single', '--programs', '1'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_without_pytest_the_extra_is_named():
    # Python's own way to say that a module cannot be imported.
    program = (
        "import sys; sys.modules['pytest'] = None; from shard_core.testing.command import command; command(['ddp'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "Error: the kit runs on pytest, which is not installed; install shard-core[testing].\n"


def test_a_rank_that_failed_is_reported_by_its_last_exception(worlds):
    with pytest.raises(RankFailed) as failure:
        worlds(2).run(chain)
    assert reason_of(failure.value).endswith("raised: ValueError: outer, on two lines")
    with pytest.raises(RankFailed) as failure:
        worlds(2).run(leave)
    assert reason_of(failure.value) in ("rank 0 died with exit code 3", "rank 1 died with exit code 3")


def test_of_ranks_that_hang_each_is_reported_with_its_place(worlds):
    worlds(2).run(dist.get_rank)
    with pytest.raises(RankFailed) as failure:
        worlds(2).run(one_sleeps, timeout=6)
    reason = reason_of(failure.value)
    assert "rank 0 did not return within 6 s, in test_command.py, line " in reason
    assert "in waits" in reason
    assert "rank 1 did not return within 6 s" in reason
    assert "in sleeps" in reason


def one_sleeps():
    sleeps() if dist.get_rank() == 1 else waits()


def sleeps():
    time.sleep(60)


def waits():
    dist.barrier()


def chain():
    print("a line\n  an indented one\nand another")
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("outer,\non two lines") from error


def leave():
    os._exit(3)


@pytest.mark.parametrize(("given", "device"), [([], ""), (["--device", "cpu"], ""), (["--device", "cuda"], "cuda")])
def test_programs_are_run_on_the_device_that_is_asked_for(given, device, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        "shard_core.testing.programs.command_line.run_programs", lambda name, count, **more: asked.append(more) or 0
    )
    assert CliRunner().invoke(command, ["ddp", "--programs", "3", *given]).exit_code == 0
    assert [each["device"] for each in asked] == [device]
