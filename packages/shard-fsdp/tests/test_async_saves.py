"""An async save is the same, bit for bit, as one that training waits for."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.checkpoint import verify
from shard_core.testing import set_up


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
