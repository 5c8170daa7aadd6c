"""LayerNorm of a batch without samples, which XLA cuts out of autograd's graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def keep_empty_batches_in_graph(module: nn.Module) -> None:
    """Make every LayerNorm in a module pass gradients of zeros through a batch without samples, as torch does.

    XLA's kernel (torch_xla 2.9.0) returns what no gradient leads back from, so that a rank with such a batch would send
    the gradients of fewer parameters than the others.

    Args:
        module: The whole module.
    """
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            part.register_forward_hook(_computed_by_element)


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
