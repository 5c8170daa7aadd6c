from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
from click.testing import CliRunner

import shard_core
from shard_core.cli.main import main

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "3",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29512",
    "TORCHELASTIC_RUN_ID": "doctor",
}


def examine(**environment: str) -> tuple[int, dict[str, dict]]:
    result = CliRunner(env=environment).invoke(main, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert report["healthy"] == (result.exit_code == 0)
    return result.exit_code, {finding["subject"]: finding for finding in report["findings"]}


def test_this_environment_is_described():
    findings = examine(OMP_NUM_THREADS="3")[1]
    assert findings["Python"]["says"].startswith(platform.python_version())
    assert findings["shard-core"] == {
        "subject": "shard-core",
        "says": importlib.metadata.version("shard-core"),
        "problem": False,
    }
    assert findings["torch"]["says"] == torch.__version__
    assert "gloo" in findings["torch.distributed"]["says"]
    assert findings["strategy ddp"]["problem"] is False
    assert findings["OMP_NUM_THREADS"]["says"] == "3"


def test_this_shard_core_is_ours():
    """The public index has a stranger's `shard-core` with a package of the same name."""
    finding = examine()[1]["shard_core"]
    assert finding["problem"] is False
    assert finding["says"] == f"imported from {Path(shard_core.__file__).resolve().parent}"


def test_a_strangers_distribution_in_front_is_a_problem(sites):
    sites[0].install("shard-core", version="0.3.0", modules={"stranger": ""})
    status, findings = examine()
    assert status == 1
    assert findings["shard_core"]["problem"] is True
    assert "which shard-core 0.3.0 does not own; uninstall shard-core" in findings["shard_core"]["says"]


def test_what_a_backend_requires_and_lacks_is_a_problem(site):
    site.install(
        "shard-toy",
        requires=("a-library-that-is-missing>=3", "torch<1", "other>=1; extra == 'testing'"),
        entries={"shard.strategies": {"toy": "toy_doctor"}},
        modules={"toy_doctor": "import a_library_that_is_missing"},
    )
    status, findings = examine()
    assert status == 1
    assert findings["shard-toy"]["says"] == (
        "1.0.0; wants a-library-that-is-missing>=3, which is not installed; "
        f"wants torch<1, and {importlib.metadata.version('torch')} is installed"
    )
    assert findings["strategy toy"]["problem"] is True
    assert "No module named 'a_library_that_is_missing'" in findings["strategy toy"]["says"]


def test_the_launcher_that_started_this_process_is_recognised():
    assert examine(**TORCHRUN)[1]["launcher"]["says"] == "torchrun: rank 1 of 3, rank 0 at 127.0.0.1:29512"


def test_without_torch_it_says_so(tmp_path):
    """A package of that name that fails to load stands in front, as after an interrupted installation."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open')")
    result = subprocess.run(
        [sys.executable, "-m", "shard_core", "doctor"],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "PROBLEM: cannot be imported (ImportError: libtorch_cpu.so: cannot open)" in result.stdout
    assert "Problems found: " in result.stdout
    assert result.stderr == ""
