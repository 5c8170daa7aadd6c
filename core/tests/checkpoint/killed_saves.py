"""Saves that are killed at one file operation after another; run as a script, it prints what was left each time.

Usage: killed_saves.py FOLDER STRIDE
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from single_rank import load
from thread_ranks import all_ranks
from torch import nn

from shard_core.checkpoint.folder import latest
from shard_core.checkpoint.sharded import ShardedCheckpointIO
from shard_core.checkpoint.tensor_state import TensorState
from shard_core.checkpoint.verify import verify

_WATCHED = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.listdir", "os.scandir"}


def _module(value: float) -> nn.Module:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def save(path: Path, value: float, form: str) -> None:
    """Save on two ranks."""

    def on_rank(coordinator: Any) -> None:
        module = _module(value)
        optimizer = torch.optim.Adagrad(module.parameters(), initial_accumulator_value=value)
        state = TensorState({"model": module}, {"optimizer": optimizer}, rank=coordinator.rank, world_size=2)
        values = {"value": value, "copy": torch.tensor(value)}
        ShardedCheckpointIO().save(path, state, values, coordinator=coordinator, information={}, state_dict_type=form)

    all_ranks(2, on_rank)


def value_in(path: Path) -> float:
    """Load a checkpoint and prove that it is one save's as a whole."""
    module = _module(-1)
    optimizer = torch.optim.Adagrad(module.parameters())
    values = load(path, module, optimizer).values
    value: float = values["value"]
    state = [slots["sum"] for slots in optimizer.state.values()]
    assert all((tensor == value).all() for tensor in [*module.parameters(), *state, values["copy"]])
    assert verify(path).is_fine
    return value


def _die_at(operation: int, folder: Path) -> None:
    """Let this process kill itself when it comes to its n-th operation on files of a folder."""
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


def _killed_save(path: Path, operation: int, value: float, form: str) -> bool:
    """Save in a child that dies at an operation; tell whether it came to that."""
    child = os.fork()
    if child == 0:
        _die_at(operation, path.parent)
        save(path, value, form)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def main(folder: Path, stride: int) -> None:
    """Sweep over all operations of a first save and of one that replaces another."""
    torch.set_num_threads(1)
    outcome: dict[str, list[str]] = {}
    for form in ("sharded", "full"):
        for kind in ("fresh", "replacing"):
            left = outcome[f"{form} {kind}"] = []
            operation, killed = 1, True
            while killed:
                run = folder / f"{form}-{kind}-{operation}"
                path = run / "step-1"
                run.mkdir()
                if kind == "replacing":
                    save(path, 0.0, form)
                killed = _killed_save(path, operation, 1.0, form)
                found = latest(run)
                left.append({None: "none", 0.0: "old", 1.0: "new"}[value_in(found) if found else None])
                save(path, 2.0, form)
                assert value_in(path) == 2.0
                assert not [each for each in path.iterdir() if "part" in each.name or "manifest.json-" in each.name]
                operation += stride
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
