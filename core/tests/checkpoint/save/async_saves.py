"""Functions for ranks that save asynchronously, and a checkpoint IO that a test can hold up."""

from __future__ import annotations

import hashlib
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shard_core import get_strategy
from shard_core.checkpoint.interface import CheckpointIO, LoadedCheckpoint, SaveHandle
from shard_core.checkpoint.save.async_save import async_save
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.testing.training import set_up

Digests = Mapping[str, str]


class Normalized(nn.Module):
    """Has buffers that change in forwards, a tied weight and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.middle = nn.Linear(10, 10)
        self.again = nn.Linear(10, 10)
        self.again.weight = self.middle.weight
        self.fixed = nn.Linear(10, 3).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.fixed(self.again(self.middle(self.norm(self.first(inputs))))).square().mean()


class Held(CheckpointIO):
    """A user's own checkpoint IO that saves asynchronously, but writes only when a file appears."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def save(self, path: Any, state: Any, values: Any, *, coordinator: Any, **options: Any) -> SaveHandle:
        if options.pop("blocking") is not False:
            return ShardedCheckpointIO().save(path, state, values, coordinator=coordinator, **options)

        def write(state: Any, values: Any, side_channel: Any) -> None:
            while not self.gate.exists():
                time.sleep(0.01)
            ShardedCheckpointIO().save(path, state, values, coordinator=side_channel, **options)

        return async_save(path, state, values, coordinator, write)

    def load(self, path: Any, state: Any, **options: Any) -> LoadedCheckpoint:
        return ShardedCheckpointIO().load(path, state, **options)

    def latest(self, folder: Any, **options: Any) -> Path | str | None:
        return ShardedCheckpointIO().latest(folder, **options)


def ready(strategy: Any, optimizer: str = "sgd") -> dict[str, Any]:
    """Set up and train two steps."""
    makers = {
        "sgd": lambda module: torch.optim.SGD(trained(module), lr=0.1, momentum=0.9),
        "adamw": lambda module: torch.optim.AdamW(trained(module), lr=0.01),
    }
    model, stepped = set_up(strategy, Normalized, makers[optimizer])
    state = {"model": model, "optimizer": stepped, "step": 2, "seen": torch.arange(4.0)}
    for _ in range(2):
        train(strategy, state)
    return state


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def train(strategy: Any, state: dict[str, Any]) -> None:
    """Take one step on random numbers."""
    loss = state["model"](torch.randn(8, 6))
    strategy.backward(loss, state["model"])
    strategy.optimizer_step(state["optimizer"])
    state["optimizer"].zero_grad()


def digests(folder: Path) -> Digests:
    """Return the digests of all files but the manifest."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.iterdir())
        if file.name != "manifest.json"
    }


def saves_twice(name: str, optimizer: str, folder: Path, form: str | None) -> tuple[Digests, Digests]:
    """Save the same moment with training waiting and with training going on; return what was written."""
    with get_strategy(name) as strategy:
        state = ready(strategy, optimizer)
        generator = torch.get_rng_state()
        strategy.save_checkpoint(folder / "waiting", state, state_dict_type=form)
        torch.set_rng_state(generator)
        handle = strategy.save_checkpoint(folder / "going-on", state, state_dict_type=form, blocking=False)
        state["seen"].zero_()
        for _ in range(3):
            train(strategy, state)
        assert handle.wait() == folder / "going-on"
        assert handle.staged.done()
        assert handle.committed.done()
        return digests(folder / "waiting"), digests(folder / "going-on")


def limited_files(size: int) -> tuple[int, int]:
    """Limit the files of this process, as on a disk that is full; return what was allowed before."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    return before
