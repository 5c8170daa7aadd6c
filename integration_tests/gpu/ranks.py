"""Small jobs under torchrun: one that trains, and some that go wrong.

Each host is an agent of torchrun, with devices of its own; ranks that share the first device do so over gloo. Between
two real hosts run the same on both, with ``--node-rank`` 0 and 1, in this folder and with benchmarks/ on PYTHONPATH:
``torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr HOST ranks.py trains hsdp cuda nccl``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from cases import Failed, Machine
from llama_loops import BILLION, TINY, UNIT_BYTES, adamw
from loops import Ours
from torch import nn
from traces import overlap, trace

from shard_core import get_strategy
from shard_core.testing.processes.script import PythonRun

TIMEOUT_SECONDS, ANSWER = 10, "answer: "


def run_ranks(
    mode: str, ranks: int, machine: Machine, seconds: float, *, name: str = "ddp", hosts: int = 1, shared: bool = False
) -> tuple[int | None, str]:
    """Run ranks until those of the first host have ended, which may take some seconds, and the others little more.

    Returns:
        The first host's exit code, None if it had to be ended, and what its ranks have written.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    there = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(ranks)))).split(",")
    share, over_gloo = ranks // hosts, machine.device == "cpu" or (shared and ranks > 1)
    words = [mode, name, machine.device, "gloo" if over_gloo else "cpu:gloo,cuda:nccl"]
    agents = []
    for host in range(hosts):
        place = [f"--nnodes={hosts}", f"--node-rank={host}", f"--nproc-per-node={share}", f"--master-port={port}"]
        command = ["-m", "torch.distributed.run", *place, "--master-addr=127.0.0.1", __file__, *words]
        own = ",".join(there[:1] if shared else there[host * share :][:share])
        agents.append(PythonRun([*command, *["quick"] * machine.quick], environment={"CUDA_VISIBLE_DEVICES": own}))
    first, *_ = (agent.outcome(TIMEOUT_SECONDS if number else seconds) for number, agent in enumerate(agents))
    return first.exit_code, first.output + first.errors


def train(ranks: int, machine: Machine, seconds: float, name: str, hosts: int = 1) -> dict[str, Any]:
    """Train on ranks, and return what the first has found out."""
    code, text = run_ranks("trains", ranks, machine, seconds, name=name, hosts=hosts)
    found = [line.partition(ANSWER)[2] for line in text.splitlines() if ANSWER in line]
    if code or not found:
        said = [line for line in text.splitlines() if "Error" in line] or text.strip().splitlines()
        raise Failed(f"{name} on {ranks} ranks ended with {code}: {' '.join(said[:1])[:400]}")
    return dict(json.loads(found[-1]))


def goes_wrong(how: str, strategy: Any) -> None:
    """Train, and die, raise, index beyond a table or not come; alone, wait for a kernel that does not end."""
    loop, device = Ours(strategy, nn.Linear(4, 4), adamw), strategy.root_device
    inputs, last = torch.ones(2, 4, device=device), strategy.global_rank == strategy.world_size - 1
    for number in range(100_000):
        loop.step(inputs)
        if number == 3 and how == "killed" and last:
            os.kill(os.getpid(), signal.SIGKILL)
        elif number == 3 and how == "raises" and last:
            raise ZeroDivisionError("one rank alone")
        elif how == "illegal":
            nn.Embedding(4, 4, device=device)(torch.tensor([2**20], device=device)).sum().item()
        elif how == "hung" and strategy.world_size == 1:
            torch.cuda._sleep(2**37)  # about a minute: longer than anyone waits, and it ends
            strategy.all_reduce(torch.ones(1, device=device)).item()
        elif how == "hung" and last:
            time.sleep(600)


def trains(strategy: Any, *, quick: bool) -> dict[str, Any]:
    """Train a Llama, every rank on the one batch, so that losses are those of one rank; time and trace its steps."""
    device, (size, steps) = strategy.root_device, (TINY, 2) if quick else (BILLION, 10)
    loop, batch = Ours(strategy, size.model(device), adamw), size.tokens(device)
    losses = [loop.step(**batch).item() for _ in range(3)]
    strategy.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        loss = loop.step(**batch)
    loss.item()
    milliseconds = (time.perf_counter() - began) / steps * 1000
    events = trace(lambda: loop.step(**batch), steps, device.type)
    return {"losses": losses, "ms": milliseconds, "overlap": overlap(events, device.type)}


def main() -> None:
    """Start the strategy, and do what the mode says."""
    mode, name, device, backend, *quick = sys.argv[1:]
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    options: dict[str, Any] = {} if name == "ddp" else {"unit_bytes": UNIT_BYTES}
    options |= {"hsdp": {"device_mesh": ("auto", local)}, "tp": {"tensor_parallel_size": max(local, 2)}}.get(name, {})
    options["precision"] = "bf16-mixed" if mode == "trains" else "32-true"
    within = timedelta(seconds=600 if mode == "trains" else TIMEOUT_SECONDS)
    ours: dict[str, Any] = {"accelerator": device, "process_group_backend": backend}
    with get_strategy(name, timeout=within, guard_timeout=within, **ours, **options) as strategy:
        if mode != "trains":
            goes_wrong(mode, strategy)
        else:
            found = trains(strategy, quick=bool(quick))
            print(ANSWER + json.dumps(found) if strategy.is_global_zero else "", flush=True)


if __name__ == "__main__":
    main()
