"""What follows the calls of a sharded module is told once of each backward."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shard_core.fully_shard.entry_methods import EntryMethods
from shard_core.fully_shard.forward_writes import ForwardWrites
from shard_core.fully_shard.uneven_calls import UnevenCalls


class Three(nn.Module):
    """Returns three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.one(x)
        return hidden.sum(), self.two(hidden).sum(), self.two(x).sum()


def times_told() -> list[int]:
    """Count the calls of each backward: through one output, through three, twice."""
    told: list[bool] = []
    module = Three()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(module, mesh=mesh)
    uneven = UnevenCalls(module, [], mesh, None, at_once=False)
    uneven.compares = False
    EntryMethods(module, [], (lambda: None, lambda: told.append(True)), ForwardWrites(module, [], mesh), uneven)
    counts = []
    for outputs in (1, 3, 3):
        x = torch.ones(2, 4, requires_grad=True)
        before = len(told)
        torch.autograd.grad(torch.stack(module(x)[:outputs]).sum(), x)
        counts.append(len(told) - before)
    return counts


def test_a_backward_is_announced_once(worlds: Any) -> None:
    assert worlds(2).run(times_told) == [[1, 1, 1]] * 2
