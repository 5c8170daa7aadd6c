"""A run on one host listens where no other host can connect, and its ranks share a secret."""

import ast
import ipaddress
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import listening
import pytest

from shard_core import get_strategy
from shard_core.coordinator import SECRET_VARIABLE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no other system shows its sockets in /proc")

_OURS = (SECRET_VARIABLE, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def for_others(found: list[str]) -> list[str]:
    return [each for each in found if not ipaddress.ip_address(each.split()[0]).is_loopback]


def test_a_launch_listens_on_the_loopback_interface_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _OURS:
        monkeypatch.delenv(name, raising=False)
    others = listening.listening(listening.family(os.getpid()))  # ranks of other tests, which this process started
    found, variables = get_strategy("ddp", accelerator="cpu", devices=2).launch(listening.trains)
    found = [each for each in found if each not in others]
    assert len(found) >= 3  # the store, and gloo on each rank
    assert for_others(found) == []
    assert len(variables[SECRET_VARIABLE]) == 64
    assert not set(_OURS) & set(os.environ)


@pytest.mark.long
def test_what_a_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {SECRET_VARIABLE: "sixteen letters and more", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "any"}
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    _, variables = get_strategy("ddp", accelerator="cpu", devices=2).launch(listening.trains)
    assert {name: variables[name] for name in chosen} == chosen
    assert {name: os.environ[name] for name in chosen} == chosen


@pytest.mark.parametrize(
    "options",
    [[], *(pytest.param(each, marks=pytest.mark.long) for each in (["--standalone"], ["--max-restarts", "1"]))],
)
def test_shard_run_listens_on_the_loopback_interface_alone(tmp_path: Path, options: list[str]) -> None:
    script = [listening.__file__, str(tmp_path / "variables")]
    command = [sys.executable, "-m", "shard_core", "run", "--nproc-per-node", "2", *options, *script]
    environ = {name: value for name, value in os.environ.items() if name not in _OURS} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found, variables = json.loads((tmp_path / "variables").read_text())
    assert len(found) >= 3
    assert for_others(found) == []
    assert variables == ["GLOO_SOCKET_IFNAME", "MASTER_ADDR", "NCCL_SOCKET_IFNAME", "SHARD_SECRET"]


@pytest.mark.long
def test_a_run_over_several_hosts_keeps_the_users_choice(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nsys.stdout.write(str(sorted(os.environ)))\n")
    port = "29577"
    choice = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    conf = ["--rdzv-conf", "is_host=1,last_call_timeout=1", "--rdzv-id", "several"]
    command = [sys.executable, "-m", "shard_core", "run", *choice, *conf, str(script)]
    environ = {name: value for name, value in os.environ.items() if name not in _OURS} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert not set(_OURS) & set(ast.literal_eval(done.stdout))


@pytest.mark.long
def test_the_secret_is_told_to_nobody_but_the_ranks(tmp_path: Path) -> None:
    secret = "f00d" * 16
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch\n"
        "from shard_core import get_strategy\n"
        "with get_strategy('ddp', accelerator='cpu') as strategy:\n"
        "    model = strategy.setup_module(torch.nn.Linear(2, 2))\n"
        f"    strategy.save_checkpoint({str(tmp_path / 'c')!r}, {{'model': model}}).wait()\n"
        "    assert strategy.global_rank == 0, 'fails'\n"
        "    strategy.barrier()\n"
    )
    run = ["run", "--nproc-per-node", "2", "--json", "--log-dir", str(tmp_path / "logs"), "--tee", "3", str(script)]
    said = ""
    for words in (run, ["doctor"]):
        environ = os.environ | {SECRET_VARIABLE: secret, "OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": ""}
        command = [sys.executable, "-m", "shard_core", *words]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
        said += done.stdout + done.stderr
    assert "fails" in said
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file != script]
    assert any(file.name == "manifest.json" for file in files)
    assert secret not in said
    assert not [file for file in files if secret.encode() in file.read_bytes()]


def folders_of_launches(strategy: Any) -> list[int]:
    """Return the permissions of what launches hand over their functions and results in."""
    del strategy
    return [each.stat().st_mode & 0o777 for each in Path(tempfile.gettempdir()).glob("shard-launch-*")]


@pytest.mark.long
def test_what_a_launch_hands_over_nobody_else_can_open() -> None:
    modes = get_strategy("ddp", accelerator="cpu", devices=2).launch(folders_of_launches)
    assert set(modes) == {0o700}
