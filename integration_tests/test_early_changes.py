"""An async save of shards that are changed before they are copied says so."""

from typing import Any

import torch
from torch import nn

from shard_core import CheckpointError, get_strategy
from shard_core.checkpoint.save.staging import Snapshot
from shard_core.testing import set_up


class Layers(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs)).square().mean()


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def changes_weights() -> list[str]:
    """Change sharded weights in some ways, each before they are copied; return the errors."""
    with get_strategy("fsdp") as strategy:
        model, optimizer = set_up(strategy, Layers, momentum)
        strategy.backward(model(torch.randn(8, 6)), model)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
        messages = []
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
                messages.append(str(error).partition(" before")[0])
        return messages


def test_changing_sharded_weights_too_early_is_an_error(worlds: Any) -> None:
    for messages in worlds(2).run(changes_weights):
        of = messages[0].partition("[")[2].partition("]")[0]
        assert messages == [
            f"'model.first.weight[{of}]' was changed",
            f"'model.first.weight[{of}]' was changed",
            f"'optim.first.weight.momentum_buffer[{of}]' was changed",
        ]
