"""Saves on a disk that is full, can only be read, or fails; run as a script, it prints "all well" if all is.

Usage: refused_saves.py MOUNT ELSEWHERE, MOUNT being a file system of 2 MiB that may be remounted; or
refused_saves.py --failing FOLDER STRIDE.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from fixtures.bits import assert_same_bits
from fixtures.thread_ranks import all_ranks, on_ranks
from torch import nn

from shard_core.checkpoint.inspection.verify import verify
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.errors import CheckpointError

FORMS = ("sharded", "full")


class Run:
    """One run on two ranks, threads of this process, that hold the same model."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self._width = width
        self._module = nn.Linear(width, 128)
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=0.1, momentum=0.9)
        self.step()

    def step(self) -> None:
        """Train."""
        self._module(torch.ones(1, self._width)).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of all tensors."""
        momentum = [slots["momentum_buffer"] for slots in self._optimizer.state.values()]
        tensors = [*self._module.parameters(), *momentum]
        return {str(place): tensor.detach().clone() for place, tensor in enumerate(tensors)}

    def save(self, path: Path, form: str) -> list[Any]:
        """Save; return what each rank raised."""

        def save_on(coordinator: Any) -> None:
            state = self._state(coordinator.rank, 2)
            io.save(path, state, {}, coordinator=coordinator, information={}, state_dict_type=form)

        io = ShardedCheckpointIO()
        return on_ranks(2, save_on)

    def _state(self, rank: int, world_size: int) -> TensorState:
        optimizers = {"optimizer": self._optimizer}
        return TensorState({"model": self._module}, optimizers, rank=rank, world_size=world_size)

    def assert_kept(self, path: Path, wanted: dict[str, torch.Tensor]) -> None:
        """Check that a checkpoint is whole and holds these tensors, in a run of its own."""
        assert verify(path).is_fine
        other = Run(self._width)
        all_ranks(1, lambda ranks: ShardedCheckpointIO().load(path, other._state(0, 1), coordinator=ranks))
        assert_same_bits(other.tensors(), wanted)


def _assert_refused(errors: list[Any], path: Path, cause: str) -> None:
    """One error on all ranks; it names the path and the cause."""
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1, errors
    assert repr(str(path)) in str(errors[0]), errors
    assert cause in str(errors[0]), errors


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused(kind: str, mount: Path, elsewhere: Path) -> None:
    """Save where there is no more room, or where nothing may be written."""
    cause = {"full": "No space left on device", "read-only": "Read-only file system"}[kind]
    for form in FORMS:
        there = elsewhere / f"{kind}-{form}"
        run, path = Run(1024), mount / form  # 1 MiB with its momentum
        assert run.save(path, "sharded") == [None, None]
        saved, before = run.tensors(), _names(mount)
        if kind == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        for refusing in (path, mount / "another" / "step-1"):
            run.step()
            _assert_refused(run.save(refusing, form), refusing, cause)
            assert set(_names(mount)) - {"another"} == set(before), (form, refusing, _names(mount))
            run.assert_kept(path, saved)
        run.step()
        assert run.save(there, form) == [None, None]
        run.assert_kept(there, run.tensors())
        if kind == "read-only":
            subprocess.run(["mount", "-o", "remount,rw", str(mount)], check=True)
        for each in mount.iterdir():
            shutil.rmtree(each)


class _FailingDisk:
    """From some operation on nothing can be made in a folder or brought to the disk; what is there can be removed."""

    _MAKING = {"os.mkdir", "os.rename"}

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._left: int | None = None
        self._lock = threading.Lock()
        self._write, self._fsync = os.write, os.fsync
        os.write, os.fsync = self._failing(os.write), self._failing(os.fsync)
        sys.addaudithook(self._audit)

    def fail_from(self, operation: int | None) -> None:
        """Fail from the n-th operation on; None for never."""
        self._left = operation

    @property
    def has_failed(self) -> bool:
        """Whether it came to that."""
        return self._left == 0

    def _tick(self) -> None:
        with self._lock:
            if self._left is None:
                return
            self._left = max(self._left - 1, 0)
            if self._left == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _failing(self, operation: Any) -> Any:
        def tick_first(*arguments: Any) -> Any:
            self._tick()
            return operation(*arguments)

        return tick_first

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._left is None or not arguments or not str(arguments[0]).startswith(self._folder):
            return
        if event in self._MAKING or (event == "open" and arguments[2] & os.O_CREAT):
            self._tick()


def failing(folder: Path, stride: int) -> None:
    """Sweep over the operations of a first save and of one that replaces another."""
    disk = _FailingDisk(folder)
    for form in FORMS:
        for kind in ("fresh", "replacing"):
            operation, failed, committed = 1, True, 0
            while failed:
                run, path = Run(8), folder / f"{form}-{kind}-{operation}"
                before, saved = [], run.tensors()
                if kind == "replacing":
                    assert run.save(path, form) == [None, None]
                    before = _names(path)
                    run.step()
                disk.fail_from(operation)
                errors = run.save(path, form)
                failed = disk.has_failed
                disk.fail_from(None)
                if failed:
                    _assert_refused(errors, path, "Input/output error")
                if (path / "manifest.json").exists() and _names(path) != before:
                    committed += failed  # only the folder's own fsync failed: nobody knows which would outlast a crash
                    run.assert_kept(path, run.tensors())
                else:
                    assert (_names(path) if path.exists() else []) == before, (form, kind, operation, _names(path))
                    assert kind == "replacing" or not path.exists(), (form, kind, operation)
                    if kind == "replacing":
                        run.assert_kept(path, saved)
                assert run.save(path, form) == [None, None]
                run.assert_kept(path, run.tensors())
                operation += stride
            assert committed <= 1, (form, kind)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "--failing":
        failing(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        for kind in ("full", "read-only"):
            refused(kind, Path(sys.argv[1]), Path(sys.argv[2]))
    print("all well")
