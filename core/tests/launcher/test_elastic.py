"""Real ranks: what they return, how they fail, and that none outlives its launch."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from rank_functions import fall, give_back, leave_early, part, total

from shard_core.errors import LaunchError, RankFailed
from shard_core.launcher import watch
from shard_core.launcher.elastic import ElasticLauncher

HERE = Path(__file__).parent
GUARDED = """
import sys
from rank_functions import wait_for_ever
from shard_core.launcher.elastic import ElasticLauncher

def train(folder):
    wait_for_ever(folder)

if __name__ == "__main__":
    ElasticLauncher(num_processes=2).launch(train, sys.argv[1])
"""
UNGUARDED = GUARDED.replace('if __name__ == "__main__":', "if True:")


def start(*arguments, **options):
    environ = os.environ | {"PYTHONPATH": str(HERE)}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def ours(output):
    """Leave out what torch 2.9's gloo prints whenever ranks connect."""
    return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("[Gloo] Rank "))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_result_of_rank_0_and_nothing_left_behind(capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environ, handlers = dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    result = ElasticLauncher(num_processes=2).launch(total, 10)
    assert torch.equal(result["tensor"], torch.full((1000,), 21.0))
    assert result["rank"] == 0
    assert result["threads"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert dict(os.environ) == environ
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    output, errors = capfd.readouterr()
    assert (ours(output), errors) == ("", "")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 1 of 2 failed: ValueError: the batch is empty"),
        pytest.param("exit", "rank 1 of 2 failed: called sys.exit(3)", marks=pytest.mark.long),
        ("kill", "rank 1 of 2 was ended by signal SIGKILL"),
        pytest.param("vanish", "rank 1 of 2 left ", marks=pytest.mark.long),
    ],
)
def test_first_failure_ends_the_launch_in_seconds(how, message, tmp_path, capfd):
    with pytest.raises(RankFailed) as caught:
        ElasticLauncher(num_processes=2).launch(fall, how, str(tmp_path))
    assert time.time() - float((tmp_path / "fell").read_text()) < 15
    assert str(caught.value).startswith(message)
    # The rank's own traceback, from the launched function on, and nobody else's.
    assert str(caught.value).count("Traceback") == (how in ("raise", "exit"))
    assert ("in fall" in str(caught.value)) == (how in ("raise", "exit"))
    errors = capfd.readouterr().err
    assert "ChildFailedError" not in errors
    assert "Connection closed" not in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "how", "gone"),
    [pytest.param(1, "exit", "rank 1 (called sys.exit(0))", marks=pytest.mark.long), (0, "return", "rank 0")],
)
def test_a_rank_that_waits_for_one_that_has_finished_fails_in_seconds(rank, how, gone):
    begin = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        ElasticLauncher(num_processes=2).launch(leave_early, rank, how)
    assert time.monotonic() - begin < 60  # their start included; torch's own timeout is thirty minutes
    assert str(caught.value).startswith(f"rank {1 - rank} of 2 failed: ")
    assert f"\n{gone} had finished by then; if rank {1 - rank} waited there in a collective" in str(caught.value)


@pytest.mark.long
def test_results_that_cannot_come_back():
    launcher = ElasticLauncher(num_processes=2)
    with pytest.raises(LaunchError, match=r"rank 0 returned an object of type _thread\.lock") as caught:
        launcher.launch(give_back, "lock")
    assert not isinstance(caught.value, RankFailed)
    # Leaving by sys.exit(0) is no failure, and what other ranks return need not travel.
    assert launcher.launch(give_back, "exit") is None


def nested_in():
    def inner():
        """Nobody can import me."""

    return inner


@pytest.mark.parametrize(
    ("function", "arguments", "sentence"),
    [
        (lambda: None, (), "a lambda cannot be sent to new processes"),
        (nested_in(), (), r"inner\(\) is defined inside nested_in\(\)"),
        (give_back, (lambda: None,), "a lambda cannot be sent"),
        (functools.partial(nested_in()), (), r"inner\(\) is defined inside"),
        (give_back, (threading.Lock(),), r"an argument of type _thread\.lock cannot be sent to new processes"),
    ],
)
def test_what_cannot_travel_gets_one_sentence(function, arguments, sentence):
    with pytest.raises(LaunchError, match=sentence) as caught:
        ElasticLauncher(num_processes=2).launch(function, *arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["-c", "stdin"])
def test_a_function_that_is_in_no_file(how):
    source = """
from shard_core.launcher.elastic import ElasticLauncher
def train(): pass
ElasticLauncher(num_processes=2).launch(train)
"""
    process = start(*(["-c", source] if how == "-c" else ["-"]), stdin=subprocess.PIPE)
    _, errors = process.communicate(source if how == "stdin" else "", timeout=60)
    assert process.returncode == 1
    assert errors.count("Traceback") == 1
    sentence = errors.strip().splitlines()[-1]
    assert sentence.startswith("shard_core.errors.LaunchError: ")
    assert "file" in sentence
    assert how == "-c" or "<stdin>" in sentence


@pytest.mark.long
def test_a_function_from_a_module_launched_by_minus_c(tmp_path):
    source = """
import rank_functions
from shard_core.launcher.elastic import ElasticLauncher
print(ElasticLauncher(num_processes=2).launch(rank_functions.total, 1)["tensor"][0].item())
"""
    process = start("-c", source)
    output, errors = process.communicate(timeout=180)
    assert (process.returncode, ours(output), errors) == (0, "3.0\n", "")


@pytest.mark.long
def test_unguarded_script_gets_one_sentence(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    process = start(script, tmp_path)
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 1
    assert output == ""
    assert errors.count("Traceback") == 1
    assert 'if __name__ == "__main__":' in errors.strip().splitlines()[-1]
    assert not list(tmp_path.glob("pid-*"))


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGINT, -signal.SIGINT, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.long),
        (signal.SIGKILL, -9),
    ],
)
def test_no_rank_outlives_its_launcher(number, status, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(GUARDED)
    process = start(script, tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, 180)
    wait_until(lambda: all(file.read_text() for file in tmp_path.glob("pid-*")), 10)
    pids = [int(file.read_text()) for file in tmp_path.glob("pid-*")]
    process.send_signal(number)
    process.wait(timeout=60)
    assert process.returncode == status
    wait_until(lambda: not any(map(is_running, pids)), 20)
    errors = process.communicate()[1]
    if number != signal.SIGKILL:  # torch lets the system interrupt ranks whose parent died, at any moment of theirs
        assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    assert "SignalException" not in errors


@pytest.mark.long
def test_ranks_that_part_are_spoken_of(caplog, monkeypatch):
    monkeypatch.setattr(watch, "_STRAGGLER_SECONDS", 1.0)
    assert ElasticLauncher(num_processes=2).launch(part) == 0
    (message,) = [record.getMessage() for record in caplog.records if record.name == "shard_core.launcher.watch"]
    assert message.startswith("rank 1 finished ")
    assert "while rank 0 goes on; if it waits there in a collective" in message
