"""Collectives of a world of one: nothing travels."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from shard_core.collectives.interface import Collectives, check_mean, reduce_op_named
from shard_core.errors import CollectiveError

if TYPE_CHECKING:
    import torch

    from shard_core.coordinator import Coordinator

T = TypeVar("T")


class SingleCollectives(Collectives):
    """Answers for a world of one rank, without torch.distributed.

    Example:
        >>> import torch
        >>> alone = SingleCollectives()
        >>> alone.all_gather(torch.tensor([1.0, 2.0])).shape
        torch.Size([1, 2])
        >>> alone.any_true(False)
        False
    """

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    def connect(self, rank: int, world_size: int, device: torch.device) -> None:
        """Refuse any world but that of one rank."""
        del device
        if (rank, world_size) != (0, 1):
            raise CollectiveError(
                f"a world of {world_size} ranks cannot talk through SingleCollectives; "
                "use a strategy for several ranks, or run one process."
            )

    def all_reduce(self, tensor: torch.Tensor, group: Any = None, reduce_op: str = "mean") -> torch.Tensor:
        """Copy the tensor."""
        del group
        check_mean(reduce_op_named(reduce_op), tensor)
        return tensor.detach().clone()

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Add a first dimension of size one."""
        del group
        return (tensor if sync_grads else tensor.detach().clone()).unsqueeze(0)

    def broadcast_object(self, value: T, src: int = 0) -> T:
        """Return the value."""
        if src != 0:
            raise CollectiveError(f"there is no rank {src} to broadcast from; the only rank is 0.")
        return value

    def gather_objects(self, value: T) -> list[T]:
        """Return the value in a list."""
        return [value]

    def barrier(self, name: str = "barrier") -> None:
        """Return at once."""

    def any_true(self, flag: bool) -> bool:
        """Return the flag."""
        return flag

    def side_channel(self) -> contextlib.AbstractContextManager[Coordinator]:
        """Return itself: it holds nothing up."""
        return contextlib.nullcontext(self)

    def close(self) -> None:
        """Do nothing."""
