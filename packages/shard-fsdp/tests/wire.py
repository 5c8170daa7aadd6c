"""What a rank sends while something runs, as torch's dispatcher sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    import torch

_GATHER, _SCATTER, _REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
_INPUT = {_GATHER: 1, _SCATTER: 1, _REDUCE: 0}
"""Where each operator of ``torch.ops.c10d`` has its input."""


class Wire(TorchDispatchMode):
    """Notes the dtype of what each collective is given, in order.

    Attributes:
        gathers: Those of whole parameters.
        scatters: Those of gradients between the ranks that shard a copy.
        reductions: Those of gradients between copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gathers: list[torch.dtype] = []
        self.scatters: list[torch.dtype] = []
        self.reductions: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note and run an operator."""
        del types
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d" and name in _INPUT:
            given = args[_INPUT[name]]
            tensor = given[0] if isinstance(given, list) else given
            {_GATHER: self.gathers, _SCATTER: self.scatters, _REDUCE: self.reductions}[name].append(tensor.dtype)
        return func(*args, **(kwargs or {}))
