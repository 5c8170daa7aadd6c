"""The members of an engine whose parameters, gradients and optimizers are torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shard_core.gradients import LocalGradient, local_gradients
from shard_core.optim.local_step import local_step
from shard_core.strategy.engine import Engine

if TYPE_CHECKING:
    import torch

    from shard_core.parameters import ParameterNames


class TorchEngine(Engine):
    """Steps plain tensors and DTensors; to be inherited beside ``Strategy``, before it.

    What is left to a strategy is how parameters are laid out and how gradients are averaged.
    """

    engine_keeps_torch_tensors = True

    def engine_add_optimizer(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, names: ParameterNames
    ) -> None:
        """Point the optimizer at the parameters the module has now."""
        names.repoint([optimizer], module)

    def engine_backward(self, loss: torch.Tensor, module: torch.nn.Module, **kwargs: Any) -> None:
        """Run autograd."""
        del module
        loss.backward(**kwargs)

    def engine_gradients(self, optimizer: torch.optim.Optimizer) -> list[LocalGradient]:
        """Return this rank's parts of ``.grad``."""
        return local_gradients(p for group in optimizer.param_groups for p in group["params"])

    def engine_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, **kwargs: Any) -> None:
        """Step the optimizer, over plain shards where its parameters are DTensors."""
        with local_step(optimizer) as outside:
            optimizer.step(None if closure is None else outside(closure), **kwargs)
