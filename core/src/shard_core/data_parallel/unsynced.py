"""Forwards in which torch's DistributedDataParallel gets ready for no backward."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from shard_core.data.transfer import move

if TYPE_CHECKING:
    import torch
    from torch import nn


class Unsynced:
    """Has a wrapper average no gradients within: it gets ready when a backward begins.

    Args:
        wrapper: A ``DistributedDataParallel``.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._before = True

    def __enter__(self) -> None:
        """Have it average none."""
        self._before = self._wrapper.require_backward_grad_sync
        self._wrapper.require_backward_grad_sync = False

    def __exit__(self, *exception: object) -> None:
        """Have it average as before."""
        self._wrapper.require_backward_grad_sync = self._before

    def leave_late(self) -> None:
        """Leave it, unless the wrapper's own ``no_sync`` around it has ended and set anew what this would undo."""
        if not self._wrapper.require_backward_grad_sync:
            self.__exit__()


def forward_of(module: nn.Module, device: torch.device) -> Any:
    """Return a forward for the wrapper that is the module's own, as where nothing is averaged in it.

    Args:
        module: The wrapped one.
        device: Where it is, to which inputs are moved on a GPU, as the wrapper does.
    """
    return functools.partial(_forward, module, device)


def _forward(module: nn.Module, device: torch.device, *inputs: Any, **kwargs: Any) -> Any:
    inputs, kwargs = move((inputs, kwargs), device) if device.type == "cuda" else (inputs, kwargs)
    return module(*inputs, **kwargs)
