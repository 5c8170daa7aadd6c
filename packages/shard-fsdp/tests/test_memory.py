"""What a rank holds while it trains: its share of parameters, gradients and optimizer state, and a unit at a time."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shard_core import get_strategy

WIDTH, BLOCKS = 256, 32
BLOCK = WIDTH * WIDTH * 4


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that are alive after each operation."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.storages: weakref.WeakSet[Any] = weakref.WeakSet()
        self.peak = 0
        self._note(*tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(*(result if isinstance(result, tuple | list) else [result]))
        # A unit is freed by shrinking its storages, which are there as long as the model is.
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages))
        return result

    def _note(self, *values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                local = value.to_local() if hasattr(value, "to_local") else value
                self.storages.add(local.untyped_storage())


def peak() -> int:
    with get_strategy("fsdp", unit_bytes=BLOCK) as strategy:
        with strategy.module_init_context():
            model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)])
        optimizer = torch.optim.AdamW(model.parameters())
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        with LiveBytes(*model.parameters()) as live:
            for _ in range(2):
                strategy.backward(model(torch.ones(1, WIDTH)).sum(), model)
                strategy.clip_gradients_norm(model, optimizer, 1.0)
                strategy.optimizer_step(optimizer)
                optimizer.zero_grad()
        return live.peak


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_rank_holds_its_share_and_a_unit(worlds: Any, size: int) -> None:
    share = 4 * BLOCKS * BLOCK / size  # AdamW keeps two moments
    for held in worlds(size).run(peak):
        assert held == pytest.approx(share + BLOCK, rel=0.1)
