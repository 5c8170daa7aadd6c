"""Runs under real strategies that are killed at random moments of a save; run as a script, it prints what was left.

Usage: killed_runs.py FOLDER KILLS SEED STRATEGY...; a run is two ranks, of which one or both are killed. Each saves
over what the one before it has left, every fourth to a new path.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shard_core import get_strategy
from shard_core.checkpoint.format.folder import latest
from shard_core.checkpoint.inspection.verify import verify

RANKS = 2
_OPTIONS: dict[str, dict[str, Any]] = {"tp": {"plan": {"0": "colwise", "2": "rowwise"}}}


def _build(strategy: Any, value: float) -> dict[str, Any]:
    with strategy.module_init_context():
        module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        for parameter in module.parameters():
            nn.init.constant_(parameter, value)
    optimizer = torch.optim.Adagrad(module.parameters(), initial_accumulator_value=max(value, 0.0))
    module, (optimizer,) = strategy.setup_module_and_optimizers(module, [optimizer])
    return {"model": module, "optimizer": optimizer, "value": value, "copy": torch.tensor(value)}


def _rank(rank: int, name: str, path: str, value: float, port: int, form: str, signals: int) -> None:
    """Run one rank of a run that saves, and signal when it is about to and when it has."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    strategy = get_strategy(name, accelerator="cpu", **_OPTIONS.get(name, {}))
    strategy.setup_environment()
    state = _build(strategy, value)
    strategy.barrier()
    os.write(signals, b"b")
    strategy.save_checkpoint(path, state, state_dict_type=form)
    os.write(signals, b"s")


def _run(name: str, path: str, value: float, form: str, victims: list[int], after: float) -> float:
    """Kill some ranks of a run so many seconds after it began to save; return how long the save took."""
    received, signals = os.pipe()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if victims:
                    with open(os.devnull, "w") as nowhere:
                        os.dup2(nowhere.fileno(), 2)
                _rank(rank, name, path, value, port, form, signals)
                status = 0
            except Exception:  # noqa: BLE001 - the parent sees that the rank has failed
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    os.close(signals)
    assert os.read(received, 1) == b"b"
    began = time.perf_counter()
    if victims:
        time.sleep(after)
        for rank in victims:
            os.kill(children[rank], signal.SIGKILL)
    else:
        saved = 0
        while saved < RANKS:
            signal_byte = os.read(received, 1)
            assert signal_byte, "the run died by itself"
            saved += signal_byte == b"s"
    took = time.perf_counter() - began
    for child in children:  # a rank that misses another would wait for it as long as its guard says
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(received)
    return took


def value_in(path: str | Path) -> float:
    """Load a checkpoint and prove that it is one save's as a whole."""
    with get_strategy("single", accelerator="cpu") as strategy:
        state = _build(strategy, -1.0)
        rest = strategy.load_checkpoint(path, state)
        value: float = state["value"]
        held = [slots["sum"] for slots in state["optimizer"].state.values()]
        tensors = [*state["model"].parameters(), *held, state["copy"]]
        assert not rest
        assert all((tensor == value).all() for tensor in tensors), path
    assert verify(path).is_fine
    return value


def main(folder: Path, kills: int, seed: int, strategies: list[str]) -> None:
    """Kill runs of each strategy in turn, and look at what each leaves."""
    torch.set_num_threads(1)
    draw = random.Random(seed)
    counts: dict[str, dict[str, int]] = {}
    for name in strategies:
        found = counts[name] = {"old": 0, "new": 0, "none": 0}
        run, value, standing, longest = folder / f"{name}-0", 1.0, None, 0.0
        for form in ("sharded", "full"):
            run.mkdir(exist_ok=True)
            longest = max(longest, _run(name, str(run / "step-1"), value, form, [], 0.0))
            standing = value_in(run / "step-1")
            assert standing == value
            value += 1
        for kill in range(kills // len(strategies)):
            if kill % 4 == 3:
                run, standing = folder / f"{name}-{kill}", None
                run.mkdir()
            victims = draw.choice([[0], [1], [0, 1]])
            form = draw.choice(["sharded", "sharded", "full"])
            _run(name, str(run / "step-1"), value, form, victims, draw.uniform(0, 1.2 * longest))
            newest = latest(run)
            left = value_in(newest) if newest else None
            assert left in (standing, value), (name, kill, left, standing, value)
            found["new" if left == value else "old" if left is not None else "none"] += 1
            standing, value = left, value + 1
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
