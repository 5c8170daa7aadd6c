"""Scripts that run beside what is judged: each once, with its own outcome, and none longer than the session."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shard_core.testing.processes import early_scripts as room
from shard_core.testing.processes.early_scripts import EarlyScripts, Script
from shard_core.testing.processes.script import PythonRun

NOTING = """\
import json, pathlib

def note(value):
    pathlib.Path(__file__).with_name("it.json").write_text(json.dumps(value))

"""
SESSION = """
import pathlib, time
from shard_core.testing.processes.early_scripts import Script

def test_interrupted(early_scripts):
    here = pathlib.Path(__file__).parent
    text = f"import os, pathlib, time; pathlib.Path({str(here)!r}, 'pid').write_text(str(os.getpid())); time.sleep(100)"
    early_scripts.start([Script(text=text)])
    while not (here / "pid").exists() or not (here / "pid").read_text():
        time.sleep(0.01)
    raise KeyboardInterrupt
"""


@pytest.fixture
def scripts():
    session = EarlyScripts()
    yield session
    session.close()


def _ended(pid, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_scripts_run_beside_one_another_and_beside_what_waits_for_them(scripts):
    text = NOTING + "import time\nbegan = time.time()\ntime.sleep(2)\nnote([began, time.time()])"
    both = [Script(text=text, arguments=(name,)) for name in ("first", "second")]
    scripts.start(both)
    (one, one_left), (other, other_left) = (scripts.result(each).notes["it"] for each in both)
    assert max(one, other) < min(one_left, other_left)


def test_a_script_runs_once_however_often_it_is_started_and_awaited(scripts):
    script = Script(text=NOTING + "import os; note(os.getpid())")
    scripts.start([script, script])
    assert scripts.result(script) is scripts.result(script)


def test_arguments_of_a_script_reach_it_and_what_it_prints_is_its_own(scripts):
    text = (
        NOTING
        + "import os, pickle, sys\n"
        + "note([sys.argv[1:], os.environ['COLOUR'], pathlib.Path(__file__).with_name('options.pickle').read_text()])\n"
        + "sys.exit('gave up')"
    )
    given = Script(text=text, arguments=("--fast",), pickled=b"options", environment=(("COLOUR", "red"),))
    quiet = Script(text="print('all is well')")
    scripts.start([given, quiet])
    run = scripts.result(given)
    assert run.notes == {"it": [["--fast"], "red", "options"]}
    assert (run.outcome.exit_code, run.outcome.errors.strip()) == (1, "gave up")
    assert str(scripts.result(quiet).outcome) == "it ended with exit code 0; it printed:\nall is well\n"


def test_a_script_that_hangs_is_ended_and_tells_so(scripts, monkeypatch):
    monkeypatch.setattr(room, "_LONGEST_SECONDS", 1.0)
    run = scripts.result(Script(text="import time; print('waiting', flush=True); time.sleep(100)"))
    assert run.outcome.exit_code is None
    assert "did not end in time; it printed:\nwaiting" in str(run.outcome)


DYING = """\
import fcntl, os, pathlib, subprocess, sys, time

here = pathlib.Path(__file__).parent
time.sleep({start})
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({life})"], pass_fds=[])
held = open(here / "lock", "w")
fcntl.flock(held, fcntl.LOCK_EX)
(here / "lock").rename(here / "mine")
if {dies}:
    held.close()
print("dead" if {dies} else "alive", flush=True)
child.wait()
"""


def _dying(**how):
    return Script(text=DYING.format(**how), dies="mine", survives=0.5)


def test_time_begins_with_a_crash_however_long_starting_took(scripts, monkeypatch):
    monkeypatch.setattr(room, "_LONGEST_SECONDS", 60.0)
    slow, hanging, undead = (
        _dying(start=4, life=1, dies=1),
        _dying(start=0, life=100, dies=1),
        _dying(start=0, life=100, dies=0),
    )
    scripts.start([slow, hanging, undead])
    assert scripts.result(slow).outcome.exit_code == 0
    for script, state in ((hanging, "dead"), (undead, "alive")):
        outcome = scripts.result(script).outcome
        assert (outcome.exit_code, outcome.output.strip()) == (None, state)


def test_a_script_in_which_nobody_dies_is_ended_too(scripts, monkeypatch):
    monkeypatch.setattr(room, "_LONGEST_SECONDS", 1.0)
    run = scripts.result(Script(text="import time; time.sleep(100)", dies="mine"))
    assert run.outcome.exit_code is None


def test_closing_ends_what_nobody_waits_for(scripts, tmp_path):
    place = str(tmp_path / "pid")
    text = f"import os, pathlib, time; pathlib.Path({place!r}).write_text(str(os.getpid())); time.sleep(100)"
    scripts.start([Script(text=text)])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.01)
    start = time.monotonic()
    scripts.close()
    assert time.monotonic() - start < 10
    assert _ended(int((tmp_path / "pid").read_text()))


@pytest.mark.long
def test_an_interrupted_session_leaves_nothing_running(tmp_path):
    (tmp_path / "test_session.py").write_text(SESSION)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_session.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert _ended(int((tmp_path / "pid").read_text()))


LAST_WORDS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit("x" * 300_000))
print("ready", flush=True)
time.sleep(60)
"""


def test_a_script_that_is_ended_is_heard_to_its_last_word():
    outcome = PythonRun(["-c", LAST_WORDS]).outcome(timeout=2.0)
    assert outcome.exit_code is None
    assert outcome.errors.count("x") >= 300_000
