"""What saving and loading costs, against writing the same bytes by hand and against torch's distributed checkpoints.

Run it with ``python integration_tests/benchmarks/checkpoint_speed.py``. An FSDP2 model and its AdamW state are written
by two ranks and read again, from the page cache, into the same shards and into shards along the other dim. All take
turns within a round. It prints median seconds, the rate, and how much memory a rank needed besides what it trains with.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shard_core import get_strategy
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.tensor_state import TensorState

WIDTH = 1024
Measured = dict[str, list[tuple[float, float]]]


class Writer:
    """What people compare with: this rank's bytes into one file, then on to the disk."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._parts = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / f"{dist.get_rank()}.bin", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for part in self._parts:
            view = part.cpu().numpy().data  # of a device a copy, which belongs to the work
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
        os.close(descriptor)
        dist.barrier()

    def load(self, folder: Path) -> None:
        with open(folder / f"{dist.get_rank()}.bin", "rb", buffering=0) as file:
            for part in self._parts:
                host = part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")
                view = host.numpy().data
                while view:
                    view = view[file.readinto(view) :]
                part.copy_(host)  # which does nothing for itself
        dist.barrier()


class Memory:
    """The most anonymous memory this process has while a block runs, above what it had before."""

    def __enter__(self) -> Memory:
        self._before, self.most, self._stop = _anonymous(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, _anonymous() - self._before)


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise LookupError("this system does not report how much anonymous memory a process has.")


@contextlib.contextmanager
def measured(results: Measured, name: str) -> Iterator[None]:
    dist.barrier()
    _synchronize()
    with Memory() as memory:
        started = time.perf_counter()
        yield
        _synchronize()
        seconds = time.perf_counter() - started
    slowest = torch.tensor([seconds, memory.most], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    results.setdefault(name, []).append((slowest[0].item(), slowest[1].item()))


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def resharded(model: nn.Module) -> nn.Module:
    """Build a module of the same names whose matrices are sharded along their other dim."""
    other = nn.Module()
    for name, parameter in model.named_parameters():
        whole = torch.zeros(parameter.shape, device=parameter.device)
        resharded_parameter = distribute_tensor(whole, parameter.device_mesh, [Shard(whole.dim() - 1)])
        _set(other, name, nn.Parameter(resharded_parameter))
    return other


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, last = name.split(".")
    for each in path:
        if not hasattr(module, each):
            module.add_module(each, nn.Module())
        module = getattr(module, each)
    module.register_parameter(last, parameter)


def compare(strategy: Any, folder: Path, megabytes: float, rounds: int, width: int = WIDTH) -> tuple[Measured, float]:
    layers = max(1, round(megabytes * 1e6 / 12 / width / width))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
    inputs = torch.randn(8, width, device=strategy.root_device)

    def train() -> None:
        strategy.backward(model(inputs).square().mean(), model)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()

    train()
    live = strategy.unwrap(model)
    slots = [slot for state in optimizer.state.values() for slot in state.values() if slot.dim()]
    held = [each.detach() for each in [*live.parameters(), *slots]]
    tensors = [each.to_local() if isinstance(each, DTensor) else each for each in held]
    total = sum(tensor.nbytes for tensor in tensors) * strategy.world_size
    other, raw, state = resharded(live), Writer(tensors), {"model": model, "optimizer": optimizer}
    side_channel = dist.new_group()  # the saves in the background must not meet training's messages
    results: Measured = {}
    steps: dict[str, Callable[[Path], object]] = {
        "save: raw write and fsync": raw.save,
        "save: DCP": lambda path: dcp.save(_dcp_state(live, optimizer), checkpoint_id=path),
        "save: ours": lambda path: strategy.save_checkpoint(path, state),
        "load: raw read": raw.load,
        "load: DCP, unverified": lambda path: dcp.load(_dcp_state(live, optimizer), checkpoint_id=path),
        "load: ours, verified": lambda path: strategy.load_checkpoint(path, dict(state)),
        "resharding load, weights only: DCP": lambda path: dcp.load(
            {"model": dict(other.named_parameters())}, checkpoint_id=path
        ),
        "resharding load, weights only: ours": lambda path: ShardedCheckpointIO().load(
            path,
            TensorState({"model": other}, {}, rank=strategy.global_rank, world_size=strategy.world_size),
            coordinator=strategy.collectives,
        ),
    }
    for number in range(rounds + 1):
        results = results if number else {}  # the first round warms up
        before = [tensor.clone() for tensor in tensors]
        for name, step in steps.items():
            if name.startswith("load"):
                for tensor in tensors:
                    tensor.zero_()
            path = folder / ("raw" if "raw" in name else "dcp" if "DCP" in name else "ours")
            with measured(results, name):
                step(path)
            assert all(map(torch.equal, before, tensors)), f"{name} leaves other values"
        with measured(results, "save in the background: DCP, until training goes on"):
            future = dcp.async_save(
                _dcp_state(live, optimizer), checkpoint_id=folder / "dcp-background", process_group=side_channel
            )
        train()
        future.result()
        with measured(results, "save in the background: ours, until training goes on"):
            handle = strategy.save_checkpoint(folder / "ours-background", state, blocking=False)
        train()
        handle.wait()
        strategy.barrier("round")
        if strategy.is_global_zero:
            for path in folder.iterdir():
                shutil.rmtree(path)
        strategy.barrier("cleared")
    return results, total


def _dcp_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, help="where to write; the system's folder for temporary files if left out"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        strategy = get_strategy("fsdp", devices=args.devices)
        result = strategy.launch(compare, Path(folder), args.megabytes, args.rounds)
    assert result is not None
    results, total = result
    table = Table("what", "seconds", "GB/s", "memory besides, MB", title=f"{total / 1e6:.0f} MB, {args.devices} ranks")
    for name, runs in results.items():
        seconds = statistics.median(seconds for seconds, _ in runs)
        size = total / 3 if "weights only" in name else total
        rate = "" if "background" in name else f"{size / seconds / 1e9:.2f}"
        table.add_row(name, f"{seconds:.3f}", rate, f"{max(most for _, most in runs) / 1e6:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
