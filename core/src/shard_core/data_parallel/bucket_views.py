"""Gradients that live in the messages they travel in, and are assigned other data."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class BucketViews:
    """Returns gradients to their buckets, where ``gradient.data = other`` has taken them away from there.

    Torch would go on to write to the other data, and send what the bucket held before.

    Args:
        parameters: Those whose gradients ``DistributedDataParallel`` keeps in its buckets.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._places: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(self) -> None:
        """Note, after a backward, where gradients are."""
        gradients = (parameter.grad for parameter in self._parameters)
        self._places = [(each, each.detach()) for each in gradients if each is not None and not each.is_sparse]

    def put_back(self) -> None:
        """Put gradients, before the next backward, where they were, with the values they have."""
        for gradient, place in self._places:
            if gradient.data_ptr() != place.data_ptr():
                place.copy_(gradient)
                gradient.data = place
        self._places = []  # torch makes its buckets anew once, and these would keep the old ones
