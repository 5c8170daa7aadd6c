"""``shard run`` as a user starts it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from shard_core.cli.main import main

SCRIPT = """
import os, sys
rank = os.environ["RANK"]
environ = f"of {os.environ['WORLD_SIZE']} on port {os.environ['MASTER_PORT']} {os.environ.get('SHARD_STRATEGY')}"
# One write per line: torchrun's ranks are unbuffered and share stdout, where print's pieces would mix.
sys.stdout.write(f"rank {rank} {environ} {sys.argv[1:]}\\n")
sys.exit(5 if "fail" in sys.argv and rank == "1" else 0)
"""


def shard_run(*arguments, **variables):
    environ = {name: value for name, value in os.environ.items() if name not in ("SHARD_STRATEGY", "SHARD_OPTIONS")}
    return subprocess.run(
        [sys.executable, "-m", "shard_core", "run", *map(str, arguments)],
        env=environ | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_options_before_the_script_are_ours_and_after_it_the_scripts(script):
    head = ["--nproc-per-node=2", "--strategy", "ddp", "--json", "--tee", "0", "--monitor-interval", "0.1"]
    done = shard_run(*head, script, "--strategy", "own", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    assert [line.split(" on port ")[0] for line in sorted(lines)] == ["rank 0 of 2", "rank 1 of 2"]
    assert all(line.endswith("ddp ['--strategy', 'own', '--json']") for line in lines)
    assert json.loads(last) == {
        "strategy": "ddp",
        "options": {},
        "script": str(script),
        "arguments": ["--strategy", "own", "--json"],
        "exit_code": 0,
    }


def test_a_failing_rank_fails_the_run(script):
    done = shard_run("--nproc-per-node", 2, "--json", script, "fail", SHARD_STRATEGY="single")
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["exit_code"] == 1
    assert json.loads(done.stdout.splitlines()[-1])["strategy"] == "single"
    assert "exitcode  : 5" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--strategy", "dpd", "script.py"], "did you mean 'ddp'?"),
        (["--nproc-per-node", "2", "nowhere.py"], "there is no script 'nowhere.py'"),
        (["--nproc-per-nod=2=", "--bogus", "script.py"], "--bogus"),
        ([], "training_script"),
        (["--option", "bucket_cap_mb", "script.py"], "'bucket_cap_mb' is no assignment; write key=value"),
        (["--strategy", "ddp", "--option", "bucket_cap=1", "script.py"], "strategy 'ddp' has no option 'bucket_cap'; "),
        (["--option", "plan={1, 2}", "script.py"], "ranks get options as JSON"),
    ],
)
def test_bad_input(arguments, sentence):
    done = CliRunner().invoke(main, ["run", *arguments])
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert isinstance(done.exception, SystemExit)


@pytest.mark.long
def test_options_reach_the_strategy_that_the_script_leaves_open(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from shard_core import get_strategy\n"
        "with get_strategy(accelerator='cpu') as strategy:\n"
        "    config = strategy.config\n"
        "    shown = config.bucket_cap_mb, config.static_graph, config.broadcast_buffers\n"
        "    shown += (strategy.precision.policy.name,)\n"
        "    sys.stdout.write(f'{strategy.world_size} {shown}\\n')\n"
    )
    head = ["--nproc-per-node", 2, "--strategy", "ddp", "--monitor-interval", "0.1", "--json"]
    typed = ["bucket_cap_mb=10", "static_graph=true", "broadcast_buffers=False"]
    done = shard_run(
        *head,
        *(each for text in typed for each in ("--option", text)),
        script,
        SHARD_OPTIONS='{"precision": "bf16-mixed", "bucket_cap_mb": 5}',
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert lines == ["2 (10, True, False, 'bf16-mixed')"] * 2
    assert json.loads(last)["options"] == {
        "precision": "bf16-mixed",
        "bucket_cap_mb": 10,
        "static_graph": True,
        "broadcast_buffers": False,
    }


def test_help_shows_torchruns_options_and_ours():
    done = shard_run("--help")
    assert done.returncode == 0
    assert "--rdzv-backend" in done.stdout
    assert "--strategy NAME" in done.stdout


@pytest.mark.long
def test_ranks_that_are_restarted_meet_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch\n"
        "from shard_core import get_strategy\n"
        "with get_strategy('ddp', accelerator='cpu') as strategy:\n"
        "    ranks = strategy.collectives.gather_objects(strategy.global_rank)\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "        sys.exit(7)\n"
        "    if strategy.is_global_zero:\n"
        "        sys.stdout.write(f'{ranks} over {os.environ[\"MASTER_ADDR\"]}\\n')\n"
    )
    done = shard_run("--nproc-per-node", 2, "--max-restarts", 1, "--monitor-interval", "0.1", script)
    assert (done.returncode, done.stdout) == (0, "[0, 1] over 127.0.0.1\n"), done.stderr


@pytest.mark.long
def test_a_port_of_the_users_choice_is_taken(script):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = shard_run("--master-port", port, script)
    assert done.returncode == 0, done.stderr
    assert f"on port {port} " in done.stdout
