"""Layers that normalize a batch without samples: XLA fails, or cuts them out of autograd's graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_INSTANCES = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}
"""How many dims an input has, samples among them."""


def keep_empty_batches_in_graph(module: nn.Module) -> None:
    """Make every LayerNorm and InstanceNorm in a module pass gradients of zeros through a batch without samples.

    From XLA's LayerNorm (torch_xla 2.9.0) no gradient leads back, so that a rank with such a batch would send the
    gradients of fewer parameters than the others. InstanceNorm with weights fails there, as torch's own does, though
    neither does for GroupNorm, which computes the same.

    Args:
        module: The whole module.
    """
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            part.register_forward_hook(_computed_by_element)
        elif isinstance(part, tuple(_INSTANCES)):
            instance = _OneInstance()
            part.register_forward_pre_hook(instance.put_in)
            part.register_forward_hook(instance.take_out)


def _computed_by_element(layer: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    """Compute an output without elements from all that it depends on."""
    if output.numel() or output.device.type != "xla" or not args:
        return None
    found = args[0]
    if layer.weight is not None:
        found = found * layer.weight
    if layer.bias is not None:
        found = found + layer.bias
    return found.to(output.dtype)


class _OneInstance:
    """Stands in a batch without samples while one layer runs."""

    def __init__(self) -> None:
        self._statistics: list[tuple[Tensor, Tensor]] | None = None

    def put_in(self, layer: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Put a sample of zeros into a batch that has none, and keep the running statistics as they are."""
        dims = next(dims for kind, dims in _INSTANCES.items() if isinstance(layer, kind))
        self._statistics = None
        if not args or args[0].dim() != dims or len(args[0]) or args[0].device.type != "xla":
            return None
        self._statistics = [(buffer, buffer.detach().clone()) for buffer in layer.buffers(recurse=False)]
        return torch.cat([args[0], args[0].new_zeros(1, *args[0].shape[1:])]), *args[1:]

    def take_out(self, layer: Any, args: Any, output: Tensor) -> Tensor | None:
        """Take it out again; statistics of nothing change nothing."""
        del layer, args
        kept, self._statistics = self._statistics, None
        if kept is None:
            return None
        for buffer, before in kept:
            buffer.data.copy_(before)  # autograd has saved it, and is not to see it change
        return output[:0]
