"""Second derivatives: a later backward reads what ``torch.autograd.grad(..., create_graph=True)`` goes through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from shard_core._versions import left_gradients, tree_leaves
from shard_core.errors import SetupError
from shard_core.fully_shard.units import sharded_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.distributed.fsdp import FSDPModule


def on_created_graph(tensors: Any, call: Callable[[], object]) -> None:
    """Call a function when a backward that creates a graph comes to some tensors.

    Without gradients, and inside what is compiled, nothing is noticed.

    Args:
        tensors: What a forward has returned, in any structure; those that nothing has computed, such as parameters,
            outlive it, and are left out.
        call: What is called, perhaps several times.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return

    def hook(gradient: torch.Tensor) -> None:
        del gradient
        if torch.is_grad_enabled():
            call()

    for tensor in tree_leaves(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            tensor.register_hook(hook)


class SecondDerivatives:
    """Keeps a module gathered from a backward that creates a graph to the end of the one that goes through that graph.

    Torch frees a unit's parameters after each backward, and gathers them for a later one where that comes to what the
    unit has returned; the graph of a gradient reads them before, and may reach them alone.

    Args:
        module: One that was sharded.

    Attributes:
        pending: Whether a graph of gradients was created since the last backward that ended.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.pending = False

    def watch(self, tensors: Any) -> None:
        """Notice a backward that creates a graph when it comes to some tensors, before units see that it is over.

        Args:
            tensors: What a forward has returned, in any structure.
        """
        on_created_graph(tensors, self._keep)

    def _keep(self) -> None:
        if self.pending:  # of many tensors
            return
        self.pending = True
        cast("FSDPModule", self._module).set_reshard_after_backward(False)

    def gather(self) -> None:
        """Gather what a backward through such a graph will read, if there is one."""
        for part in sharded_parts(self._module) if self.pending else ():
            part.unshard()

    def end(self, *, deferred: bool) -> None:
        """Free what was kept.

        Args:
            deferred: Whether gradients are to stay on their rank.

        Raises:
            SetupError: If gradients were left on their rank, by a backward that the strategy did not see.
        """
        if not self.pending:
            return
        self.pending = False
        left = not deferred and left_gradients(sharded_parts(self._module))
        cast("FSDPModule", self._module).set_reshard_after_backward(True)
        for part in sharded_parts(self._module):
            part.reshard()
        if left:
            raise SetupError(
                "the backward of a loss with gradients in it has left gradients on their rank; call "
                "strategy.backward(loss, model) instead of loss.backward()."
            )
