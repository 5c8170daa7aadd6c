"""What is replicated on every rank: values from rank 0 at the start, and averaged gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from shard_core.initialization.recording import is_recorded


def send_values(module: nn.Module) -> None:
    """Broadcast the values of rank 0's parameters and buffers to every rank.

    Args:
        module: The same on every rank but for values; tensors that have none yet are left out.
    """
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if not is_recorded(tensor) and dist.get_world_size() > 1:
                dist.broadcast(tensor.data, src=0)


class AveragedGradients:
    """Averages the gradients of parameters that are whole on every rank, as backward makes them.

    Args:
        parameters: Those the engine has not sharded.

    Attributes:
        deferred: While True, gradients add up on this rank; the next backward averages their sum.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.deferred = False
        for parameter in parameters:
            if parameter.is_floating_point() or parameter.is_complex():
                trained = parameter.requires_grad
                parameter.requires_grad_(True)  # torch takes no hooks else, and what is frozen may be unfrozen later
                parameter.register_post_accumulate_grad_hook(self._average)
                parameter.requires_grad_(trained)

    def _average(self, parameter: torch.Tensor) -> None:
        # Averaging what was averaged before changes nothing, so the sum over micro-batches comes out right.
        if not self.deferred and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
