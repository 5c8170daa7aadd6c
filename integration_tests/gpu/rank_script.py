"""One rank of a small job that goes wrong, or tries what carries its tensors; a script, since ranks are processes.

``run_ranks`` starts it. Two ranks share one device over gloo: each stands as the only one of a host of its own, since
ranks of one host need a device each. NCCL refuses them.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from loops import Ours
from torch import nn

from shard_core import get_strategy

TIMEOUT_SECONDS = 10
ANSWER = "answer: "


def run_ranks(mode: str, ranks: int, device: str, seconds: float) -> list[tuple[int | None, str]]:
    """Run ranks of ddp until rank 0 has ended, which may take some seconds, and the others little more.

    Returns:
        Each rank's exit code, None for one that had to be ended, and what it has written.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    codes: list[int | None] = []
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(ranks)]
        processes = []
        for rank, path in enumerate(outputs):
            place: dict[str, Any] = {"RANK": rank, "GROUP_RANK": rank, "WORLD_SIZE": ranks}
            place |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            given = os.environ | {name: str(value) for name, value in place.items()}
            command = [sys.executable, __file__, mode, device]
            with path.open("w") as output:
                processes.append(subprocess.Popen(command, env=given, stdout=output, stderr=output))
        for rank, process in enumerate(processes):
            try:
                codes.append(process.wait(TIMEOUT_SECONDS if rank else seconds))
            except subprocess.TimeoutExpired:
                codes.append(None)
                process.kill()
                process.wait()
        return list(zip(codes, (path.read_text() for path in outputs), strict=True))


def answer_of(text: str) -> Any:
    """Return what a rank has found out; None if it did not get there."""
    found = [line.removeprefix(ANSWER) for line in text.splitlines() if line.startswith(ANSWER)]
    return json.loads(found[-1]) if found else None


def _collectives(strategy: Any, step: Callable[[], Any]) -> dict[str, str]:
    """Try each; return what it raised, nothing where it carried tensors of the device."""
    del step
    device, rank, outcome = strategy.root_device, strategy.global_rank, {}
    mine = torch.full((2,), float(rank + 1), device=device)
    reduced = {"mean": 1.5, "sum": 3.0, "max": 2.0, "min": 1.0, "product": 2.0}
    tries: dict[str, tuple[float, Callable[[], Any]]] = {
        f"all_reduce {op}": (expected, functools.partial(strategy.all_reduce, mine, reduce_op=op))
        for op, expected in reduced.items()
    }
    tries |= {
        "reduce": (1.5, lambda: strategy.reduce(mine)),
        "all_gather": (2.0, lambda: strategy.all_gather(mine)),
        "all_gather with gradients": (2.0, lambda: strategy.all_gather(mine.clone().requires_grad_(), sync_grads=True)),
        "broadcast of a tensor": (1.0, lambda: strategy.broadcast(mine)),
        "broadcast of an object": (1.0, lambda: strategy.broadcast({"a": [mine]})["a"][0]),
    }
    for name, (expected, attempt) in tries.items():
        try:
            result = attempt()
            came = "" if result.device.type == device.type else f"comes back on {result.device}"
            came = came if result.flatten()[-1].item() == expected else f"gives {result.tolist()}"
        except Exception as error:  # noqa: BLE001 - what it says is the outcome
            came = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        outcome[name] = came
        strategy.barrier()
    return outcome


def _killed(strategy: Any, step: Callable[[], Any]) -> None:
    for number in range(100_000):
        step()
        if number == 3 and strategy.global_rank == strategy.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def _hung(strategy: Any, step: Callable[[], Any]) -> None:
    """Wait for a rank that does not come or, alone, for a kernel that does not end."""
    step()
    if strategy.world_size == 1:
        torch.cuda._sleep(2**37)  # about a minute: longer than anyone waits, and it ends
    elif strategy.global_rank:
        time.sleep(600)
    step()
    strategy.all_reduce(torch.ones(1, device=strategy.root_device)).item()


def _illegal(strategy: Any, step: Callable[[], Any]) -> None:
    step()
    table = nn.Embedding(4, 4, device=strategy.root_device)
    table(torch.tensor([2**20], device=strategy.root_device)).sum().item()


MODES = {"collectives": _collectives, "killed": _killed, "hung": _hung, "illegal": _illegal}


def main() -> None:
    """Start the strategy, train a little, and do what the mode says."""
    mode, device = sys.argv[1:]
    duration = timedelta(seconds=TIMEOUT_SECONDS)
    backend = "gloo" if os.environ["WORLD_SIZE"] != "1" else None
    with get_strategy(
        "ddp", accelerator=device, process_group_backend=backend, timeout=duration, guard_timeout=duration
    ) as strategy:
        strategy.setup_environment()
        inputs = torch.ones(2, 4, device=strategy.root_device)
        loop = Ours(strategy, nn.Linear(4, 4), functools.partial(torch.optim.SGD, lr=0.1))
        print(ANSWER + json.dumps(MODES[mode](strategy, lambda: loop.step(inputs))), flush=True)


if __name__ == "__main__":
    main()
