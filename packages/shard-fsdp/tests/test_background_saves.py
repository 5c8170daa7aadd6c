"""A save behind training is the same, bit for bit, as one that training waits for."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.checkpoint.inspection.verify import verify
from shard_core.checkpoint.save.snapshot import Snapshot
from shard_core.errors import CheckpointError
from shard_core.testing.training import set_up


class Normalized(nn.Module):
    """Has buffers that change in forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(inputs))).square().mean()


MAKERS = {
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=0.01),
}


def train(strategy: Any, model: Any, optimizer: Any) -> None:
    strategy.backward(model(torch.randn(8, 6)), model)
    strategy.optimizer_step(optimizer)
    optimizer.zero_grad()


def digests(folder: Path) -> dict[str, str]:
    files = [file for file in folder.iterdir() if file.name != "manifest.json"]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def saves_twice(optimizer: str, precision: str, folder: Path) -> tuple[Any, Any]:
    """Save the same moment with training waiting and with training going on; give what was written."""
    with get_strategy("fsdp", precision=precision) as strategy:
        model, stepped = set_up(strategy, Normalized, MAKERS[optimizer])
        state = {"model": model, "optimizer": stepped}
        for _ in range(2):
            train(strategy, model, stepped)
        strategy.save_checkpoint(folder / "waiting", state)
        handle = strategy.save_checkpoint(folder / "going-on", state, blocking=False)
        for _ in range(4):
            train(strategy, model, stepped)
        handle.wait()
        strategy.load_checkpoint(folder / "going-on", state)
        strategy.save_checkpoint(folder / "again", state)
        return digests(folder / "waiting"), digests(folder / "going-on")


@pytest.mark.parametrize(
    ("size", "optimizer", "precision"), [(1, "adamw", "32-true"), (2, "sgd", "32-true"), (2, "adamw", "bf16-mixed")]
)
def test_it_writes_the_bits_of_the_moment_it_was_called(
    worlds: Any, tmp_path: Path, size: int, optimizer: str, precision: str
) -> None:
    for waiting, going_on in worlds(size).run(saves_twice, optimizer, precision, tmp_path):
        assert waiting == going_on
        assert len(waiting) > 2
    assert verify(tmp_path / "again").is_fine


def changes_weights() -> list[str]:
    """Change sharded weights in some ways, each before they are copied; give what is said of it."""
    with get_strategy("fsdp") as strategy:
        model, optimizer = set_up(strategy, Normalized, MAKERS["sgd"])
        train(strategy, model, optimizer)
        said = []
        for change in (
            lambda weight: weight.mul_(2.0),
            lambda weight: weight.to_local().mul_(2.0),
            lambda weight: optimizer.state[weight]["momentum_buffer"].zero_(),
            lambda weight: model(torch.randn(8, 6)),
        ):
            state = strategy.engine_state({"model": model}, {"optimizer": optimizer})
            snapshot = Snapshot(state, {}, rank=strategy.global_rank)
            snapshot.take()
            with torch.no_grad():
                change(model.first.weight)
            try:
                snapshot.stage()
            except CheckpointError as error:
                said.append(str(error).partition(" before")[0])
        return said


def test_who_changes_sharded_weights_too_early_is_told(worlds: Any) -> None:
    for said in worlds(2).run(changes_weights):
        of = said[0].partition("[")[2].partition("]")[0]
        assert said == [
            f"'model.first.weight[{of}]' was changed",
            f"'model.first.weight[{of}]' was changed",
            f"'optim.first.weight.momentum_buffer[{of}]' was changed",
        ]
