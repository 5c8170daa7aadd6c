"""The running variances of BatchNorm and InstanceNorm, which XLA computes otherwise than torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE = {nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}
"""How many dims of an input a variance is taken over, whether it has a dim of samples or not."""


def correct_running_variances(module: nn.Module) -> None:
    """Make the running variances in a module those that torch documents: of unbiased variances.

    XLA adds up biased ones (torch_xla 2.9.0), a sixteenth too little where a channel has sixteen values, so that what
    is evaluated would be another model than under any other strategy.

    Args:
        module: The whole module.
    """
    for part in module.modules():
        if isinstance(part, (*_BATCH, *_INSTANCE)) and part.running_var is not None:
            correction = _Correction()
            part.register_forward_pre_hook(correction.before)
            part.register_forward_hook(correction.after)


class _Correction:
    """Adds to one layer's running variance what a forward left out."""

    def __init__(self) -> None:
        self._old: Tensor | None = None

    def before(self, layer: Any, args: Any) -> None:
        """Keep the variance if this forward is to change it, and on XLA's device: on the host it is right already."""
        del args
        variance = layer.running_var
        self._old = variance.detach().clone() if layer.training and variance.device.type == "xla" else None

    def after(self, layer: Any, args: Any, output: Tensor) -> None:
        """Make n / (n - 1) times what came in of it."""
        del args
        old, self._old = self._old, None
        if old is None:
            return
        instances = isinstance(layer, tuple(_INSTANCE))
        share: Any = layer.momentum
        if share is None:  # of BatchNorm the mean of all batches, of InstanceNorm nothing
            share = 0.0 if instances else 1.0 / layer.num_batches_tracked.to(old.dtype)
        variance = layer.running_var.data  # autograd has saved it, and is not to see it change, as with torch
        came_in = variance - (1.0 - share) * old
        variance.add_(came_in / (_values(layer, output) - 1))


def _values(layer: Any, output: Tensor) -> int:
    """Count the values that a variance is taken over: an instance's of a channel, or those of the whole batch."""
    dims = next((dims for kind, dims in _INSTANCE.items() if isinstance(layer, kind)), None)
    return output.shape[-dims:].numel() if dims else output.numel() // layer.num_features
