"""What split layers return: tensors of their own, which users may change in place as those of whole layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shard_tp._versions import is_local_view


def return_no_views(module: nn.Module) -> None:
    """Have split layers return no views of the local tensors of what they have computed.

    Torch refuses to change such a view in place, and warns of each that a unit returns to a backward.

    Args:
        module: One whose layers were split.
    """
    for part in module.modules():
        if any(isinstance(each, DTensor) for each in part.parameters(recurse=False)):
            part.register_forward_hook(_pass_on)


def _pass_on(module: nn.Module, args: Any, output: Any) -> torch.Tensor | None:
    """Return a layer's output as a tensor that is no view; nothing is copied, and none but the layer holds the base."""
    del module, args
    if torch.compiler.is_compiling() or not isinstance(output, torch.Tensor) or not is_local_view(output):
        return None
    passed: torch.Tensor = _PassedOn.apply(output)  # type: ignore[no-untyped-call]
    return passed


class _PassedOn(torch.autograd.Function):
    """Returns its input, as a tensor that counts as no view of it to autograd."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Share the memory, and the count of changes in place."""
        del ctx
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Pass the gradient through."""
        del ctx
        return gradient
