"""What a rank sends while something runs, as torch's dispatcher sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    import torch


class Wire(TorchDispatchMode):
    """Records the dtype of what is sent of each unit, in order, where two ranks shard a copy of a small model.

    Attributes:
        gathers: Those of whole parameters.
        scatters: Those of gradients between the ranks that shard a copy.
        scattered: How many elements of gradients this rank sent the other.
        reductions: Those of gradients between copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gathers: list[torch.dtype] = []
        self.scatters: list[torch.dtype] = []
        self.scattered = 0
        self.reductions: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record and run an operator."""
        del types
        if func.namespace == "c10d":
            self._note(func.__name__.partition(".")[0], *args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, given: Any, *more: Any) -> None:
        # Ranks that shard a copy are neighbours; each broadcasts its own shard.
        if name == "broadcast_" and more[1] == dist.get_rank() % 2:
            self.gathers.append(given[0].dtype)
        elif name == "send":
            self.scatters.append(given[0].dtype)
            self.scattered += given[0].numel()
        elif name == "allreduce_" and given[0].is_floating_point():
            self.reductions.append(given[0].dtype)
