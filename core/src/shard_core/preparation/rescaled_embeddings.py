"""Embeddings with ``max_norm``, whose forward rescales the rows that its samples look up, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shard_core.errors import SetupError
from shard_core.parameters import plain_module_name

if TYPE_CHECKING:
    import torch

_INSTEAD = (
    "make it without, and rescale all rows between steps, under torch.no_grad(): "
    "weight.mul_((max_norm / weight.norm(dim=1, keepdim=True)).clamp(max=1))."
)


class RescaledEmbeddings:
    """The embeddings of a module that rescale rows of their weights in forward.

    Where all ranks look up the same rows, they rescale the same. Where each has samples of its own, a frozen weight
    that is whole on every rank gives the same outputs all the same: rows that are yet to be rescaled are so before they
    are used.

    Args:
        module: The user's, before setup.
        data_ranks: How many ranks have samples of their own.
    """

    def __init__(self, module: nn.Module, data_ranks: int) -> None:
        self._data_ranks = data_ranks
        self._layers = {
            plain_module_name(name) or "itself": part
            for name, part in module.named_modules()
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None
        }

    def check_frozen(self) -> None:
        """Check that no weight is trained whose rows ranks would rescale apart.

        Raises:
            SetupError: Naming the first.
        """
        for name, part in self._layers.items() if self._data_ranks > 1 else ():
            if part.weight.requires_grad:
                raise SetupError(
                    f"the embedding {name!r} has max_norm, by which each rank would rescale the rows of its own "
                    f"samples, and ranks would drift apart; {_INSTEAD}"
                )

    def check_whole(self, *, sharded: bool) -> None:
        """Check, after setup, that every rank has all rows to rescale.

        Args:
            sharded: Whether parameters of the module have become parts, of whatever class.

        Raises:
            SetupError: Naming the first embedding of which that is not so.
        """
        for name, part in self._layers.items():
            weight: torch.Tensor | None = getattr(part, "weight", None)  # engines may have taken it out
            split = _is_split(weight) if isinstance(weight, DTensor) else sharded and self._data_ranks > 1
            if split:
                raise SetupError(
                    f"the embedding {name!r} has max_norm, by which its forward rescales rows, and this strategy "
                    f"spreads its weight over ranks, which would rescale other rows or none; {_INSTEAD}"
                )


def _is_split(weight: DTensor) -> bool:
    sizes = zip(weight.device_mesh.shape, weight.placements, strict=True)
    return any(size > 1 and not isinstance(placement, Replicate) for size, placement in sizes)
