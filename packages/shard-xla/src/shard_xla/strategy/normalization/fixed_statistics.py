"""BatchNorm and InstanceNorm by fixed statistics, past which XLA computes no gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE = {nn.InstanceNorm1d: 2, nn.InstanceNorm2d: 3, nn.InstanceNorm3d: 4}
"""How many dims a single instance has, its channels first."""
_FORWARDS = (nn.BatchNorm1d.forward, nn.InstanceNorm1d.forward)
"""What is replaced: a class with a forward of its own may do more."""


def lead_back_past_fixed_statistics(module: nn.Module) -> None:
    """Lead gradients back past the normalization of layers in evaluation mode, as fine-tuning often has them.

    The backward of XLA's kernel (torch_xla 2.9.0) raises: it asks for the statistics of the batch, and there are none.

    Args:
        module: The whole module.
    """
    for part in module.modules():
        if isinstance(part, (*_BATCH, *_INSTANCE)) and type(part).forward in _FORWARDS:
            part.register_forward_hook(_computed_by_element)


def _computed_by_element(layer: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    """Compute an output from all that it depends on; what the kernel has computed is never looked at."""
    fixed = not layer.training and layer.running_mean is not None
    if not (fixed and args and output.requires_grad and output.device.type == "xla"):
        return None
    alone = next((dims for kind, dims in _INSTANCE.items() if isinstance(layer, kind)), 0) == output.dim()
    channels = (-1, *[1] * (output.dim() - (1 if alone else 2)))

    def spread(values: Tensor) -> Tensor:
        return values.view(channels)

    scale = (layer.running_var + layer.eps).rsqrt()
    found = (args[0] - spread(layer.running_mean)) * spread(scale)
    if layer.weight is not None:
        found = found * spread(layer.weight) + spread(layer.bias)
    return found.to(output.dtype)
