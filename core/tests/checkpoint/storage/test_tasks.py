"""Files go to the disk beside what else is done, and what fails there is not lost."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shard_core.checkpoint.storage.local import LocalFolder
from shard_core.checkpoint.storage.tasks import Tasks


def test_all_are_done_before_a_failure_is_raised() -> None:
    gate, done = threading.Event(), []

    def fail() -> None:
        raise OSError(errno.EIO, "the disk is broken")

    def wait() -> None:
        gate.wait(30)
        done.append("waited")

    tasks = Tasks()
    tasks.begin(wait)
    tasks.begin(fail)
    assert tasks.busy
    gate.set()
    with pytest.raises(OSError, match="the disk is broken"):
        tasks.wait()
    assert done == ["waited"]
    assert not tasks.busy


def test_a_process_about_to_exit_still_does_them() -> None:
    script = """
import atexit
from shard_core.checkpoint.storage.tasks import Tasks

def drain():
    tasks = Tasks()
    tasks.begin(lambda: print("done"))
    tasks.wait()

atexit.register(drain)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "done\n"


@pytest.mark.parametrize("failing", [None, 1])
def test_a_long_file_is_on_its_way_before_its_end_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int | None
) -> None:
    lengths: list[int] = []
    on_its_way = threading.Event()
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        lengths.append(os.fstat(descriptor).st_size)
        on_its_way.set()
        if len(lengths) == failing:
            raise OSError(errno.EIO, "the disk is broken")  # as disks do: once, and to one caller
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    block = memoryview(bytes(1 << 22))
    with LocalFolder(tmp_path).create("long", 12 * len(block)) as file:
        for _ in range(11):
            file.write(block)
        assert on_its_way.wait(60), "on a busy machine a thread may begin late"
        file.write(block)
        if failing is None:
            file.finish()
        else:
            with pytest.raises(OSError, match="the disk is broken"):
                file.finish()
    assert lengths[0] < lengths[-1] == 12 * len(block) == (tmp_path / "long").stat().st_size
