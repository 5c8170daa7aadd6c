"""Saves that are killed at one file operation after another; run as a script, it prints what was left each time.

Usage: killed_saves.py FOLDER STRIDE VICTIM...; a victim is "all", both ranks as threads of one process, or the rank,
"0" or "1", of the one of two processes that dies while the other goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from fixtures.single_rank import load
from fixtures.thread_ranks import all_ranks
from torch import nn

from shard_core.checkpoint.format.folder import latest
from shard_core.checkpoint.inspection.verify import verify
from shard_core.checkpoint.retention.policy import Retention
from shard_core.checkpoint.retention.removal import remove_leftovers
from shard_core.checkpoint.retention.run_folder import run_entry
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.checkpoint.storage.local import LocalFolder
from shard_core.collectives.process_group import ProcessGroupCollectives

_WATCHED = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.listdir", "os.scandir"}
#: How many seconds a rank may need to find out that the other has died.
_PATIENCE = 60.0
KINDS = ("fresh", "replacing", "retaining")


def module_of(value: float) -> nn.Module:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def _save_on(coordinator: Any, path: Path, value: float, form: str, retention: Retention | None) -> None:
    module = module_of(value)
    optimizer = torch.optim.Adagrad(module.parameters(), initial_accumulator_value=value)
    state = TensorState({"model": module}, {"optimizer": optimizer}, rank=coordinator.rank, world_size=2)
    ShardedCheckpointIO(retention=retention).save(
        path,
        state,
        {"value": value, "copy": torch.tensor(value)},
        coordinator=coordinator,
        information={},
        state_dict_type=form,
    )


def save(path: Path, value: float, form: str, retention: Retention | None = None) -> None:
    """Save on two ranks, threads of this process."""
    all_ranks(2, lambda coordinator: _save_on(coordinator, path, value, form, retention))


def value_in(path: Path) -> float:
    """Load a checkpoint and check that it is one save's as a whole."""
    module = module_of(-1)
    optimizer = torch.optim.Adagrad(module.parameters())
    value = values_of(load(path, module, optimizer).values, module)
    assert all((slots["sum"] == value).all() for slots in optimizer.state.values())
    assert verify(path).is_fine
    return value


def values_of(values: Any, module: nn.Module) -> float:
    """Return the one value that all values and weights of a checkpoint have."""
    value: float = values["value"]
    assert all((tensor == value).all() for tensor in [*module.parameters(), values["copy"]])
    return value


def _die_at(operation: int, folder: Path) -> None:
    """Kill this process when it comes to its n-th operation on files of a folder."""
    count = 0

    def tick() -> bool:
        nonlocal count
        count += 1
        return count == operation

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _WATCHED and str(arguments[0]).startswith(str(folder)) and tick():
            os.kill(os.getpid(), signal.SIGKILL)

    write, fsync = os.write, os.fsync

    def die_writing(descriptor: int, data: Any) -> int:
        if tick():
            write(descriptor, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, data)

    def die_syncing(descriptor: int) -> None:
        if tick():
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    os.write, os.fsync = die_writing, die_syncing
    sys.addaudithook(audit)


def _killed_as_a_whole(path: Path, operation: int, form: str, retention: Retention | None) -> bool:
    """Save in a child that dies at an operation; return whether it came to that."""
    child = os.fork()
    if child == 0:
        _die_at(operation, path.parent)
        save(path, 1.0, form, retention)
        os._exit(0)
    status = _status_of(child)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def _killed_alone(path: Path, operation: int, form: str, retention: Retention | None, victim: int) -> bool:
    """Save in a child per rank, of which one dies at an operation; return whether it came to that."""
    meeting = path.parent.with_name(f"{path.parent.name}-meeting")
    children = []
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            with contextlib.suppress(BaseException), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
                timeout = timedelta(seconds=_PATIENCE / 2)
                store = torch.distributed.FileStore(str(meeting), 2)
                torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
                collectives = ProcessGroupCollectives()
                collectives.connect(rank, 2, torch.device("cpu"))
                if rank == victim:
                    _die_at(operation, path.parent)
                _save_on(collectives, path, 1.0, form, retention)
                os._exit(0)
            os._exit(1)
    killed = os.WIFSIGNALED(_status_of(children[victim]))
    began = time.monotonic()
    status = _status_of(children[1 - victim])
    assert time.monotonic() - began < _PATIENCE
    # Who goes on fails, unless all that was left to do was to hear of it.
    assert os.WIFEXITED(status)
    assert killed or status == 0
    return killed


def _status_of(child: int) -> int:
    """Wait for a child, but not for ever."""
    deadline = time.monotonic() + 2 * _PATIENCE
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("a rank waits for one that has died")


def _what_is_left(run: Path, operation: int, form: str, kind: str, victim: str) -> tuple[bool, str]:
    """Kill one save; return whether it came to that, and what checkpoint then is the newest."""
    path = run / "step-2"
    retention = Retention(keep_last=1) if kind == "retaining" else None
    if kind != "fresh":
        save(run / "step-1" if kind == "retaining" else path, 0.0, form)
    killed = (
        _killed_as_a_whole(path, operation, form, retention)
        if victim == "all"
        else _killed_alone(path, operation, form, retention, int(victim))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none is passed over as damaged
        found = latest(run)
    left = {None: "none", 0.0: "old", 1.0: "new"}[value_in(found) if found else None]
    save(path, 2.0, form, retention)
    assert value_in(path) == 2.0
    assert latest(run) == path
    entry = run_entry(LocalFolder(path))
    assert entry is not None
    remove_leftovers(entry)  # as ``shard checkpoint prune`` does
    assert value_in(path) == 2.0
    content = json.loads((path / "manifest.json").read_text())
    named = {content["index"]["path"], *(file["path"] for file in content["files"])}
    assert {each.name for each in path.iterdir()} == {"manifest.json", *named}
    return killed, left


def main(folder: Path, stride: int, victims: list[str]) -> None:
    """Sweep over all operations of a first save, of one that replaces another, and of one that removes another."""
    torch.set_num_threads(1)
    outcome: dict[str, list[str]] = {}
    for form, kind, victim in itertools.product(("sharded", "full"), KINDS, victims):
        left = outcome[f"{form} {kind} {victim}"] = []
        operation, killed = 1, True
        while killed:
            run = folder / f"{form}-{kind}-{victim}-{operation}"
            run.mkdir()
            killed, newest = _what_is_left(run, operation, form, kind, victim)
            left.append(newest)
            shutil.rmtree(run)
            operation += stride
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
