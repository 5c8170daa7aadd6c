from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.scripts import environment

_SCRIPT = Path(__file__).with_name("refused_saves.py")
_MOUNT = 'mount -t tmpfs -o size=2m none "$1" 2>/dev/null || exit 77; shift; exec "$@"'


def _run(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=environment())


def test_a_disk_that_takes_no_more_is_one_error_on_all_ranks_and_training_goes_on(tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("a small file system of its own needs unshare")
    mount, elsewhere = tmp_path / "mount", tmp_path / "elsewhere"
    mount.mkdir()
    script = [sys.executable, str(_SCRIPT), str(mount), str(elsewhere)]
    # In namespaces of its own, so that the mount goes when the process does.
    done = _run(["unshare", "--map-root-user", "--mount", "sh", "-c", _MOUNT, "sh", str(mount), *script], 280)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("this machine lets nobody mount a small file system")
    assert done.stdout == "all well\n", done.stderr


@pytest.mark.parametrize("stride", [35, pytest.param(1, marks=pytest.mark.long)])
def test_a_disk_that_fails_at_any_operation_leaves_the_old_checkpoint_and_nothing_else(tmp_path, stride):
    done = _run([sys.executable, str(_SCRIPT), "--failing", str(tmp_path), str(stride)], 280)
    assert done.stdout == "all well\n", done.stderr
