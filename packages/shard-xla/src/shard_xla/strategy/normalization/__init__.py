"""What XLA computes otherwise than torch, or fails to, in layers that normalize."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_xla.strategy.normalization.empty_batches import keep_empty_batches_in_graph
from shard_xla.strategy.normalization.running_variance import correct_running_variances

if TYPE_CHECKING:
    from torch import nn

__all__ = ["correct_normalization"]


def correct_normalization(module: nn.Module) -> None:
    """Make the layers of a module that normalize do so as in torch; on the host they are torch's own.

    Args:
        module: The whole module.
    """
    correct_running_variances(module)
    keep_empty_batches_in_graph(module)
