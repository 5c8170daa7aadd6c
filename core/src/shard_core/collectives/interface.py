"""The interface of collectives, of which every strategy holds one, and the reductions by name."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

from shard_core.errors import CollectiveError, MissingCapability, nearest

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from datetime import timedelta

    import torch

    from shard_core.coordinator import Coordinator

T = TypeVar("T")

ReduceOp = Literal["mean", "sum", "max", "min", "product"]


def reduce_op_named(op: object) -> ReduceOp:
    """Return the canonical name of what a user gave as reduction.

    Args:
        op: A reduction's name in any case, of which ``"avg"`` means ``"mean"``; a member of
            ``torch.distributed.ReduceOp``; or None for the mean.

    Returns:
        The canonical name.

    Raises:
        CollectiveError: If there is no such reduction.

    Example:
        >>> reduce_op_named("AVG")
        'mean'
        >>> reduce_op_named(None)
        'mean'
    """
    if op is None:
        return "mean"
    # torch has members, and objects made from a member, which have it as ``op``.
    name = op if isinstance(op, str) else str(getattr(getattr(op, "op", op), "name", op))
    word = {"avg": "mean", "prod": "product"}.get(name.lower(), name.lower())
    for known in get_args(ReduceOp):
        if word == known:
            return known  # type: ignore[no-any-return]
    hint = nearest(word, get_args(ReduceOp))
    raise CollectiveError(
        f"there is no reduction {name!r}{hint or '.'} The reductions are: {', '.join(get_args(ReduceOp))}."
    )


def check_mean(op: ReduceOp, tensor: torch.Tensor) -> None:
    """Refuse a mean that its dtype cannot hold, and sums of truth values, which would be truth values again.

    Args:
        op: The reduction asked for.
        tensor: What is to be reduced.

    Raises:
        CollectiveError: If it is the mean of whole numbers, or the mean or sum of truth values.
    """
    if op == "sum" and str(tensor.dtype) == "torch.bool":
        raise CollectiveError(
            "the sum of bool values is no truth value; convert the tensor to an integer dtype to count, or ask for "
            "reduce_op='max' or 'min', whether any or all are true."
        )
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise CollectiveError(
            f"the mean of {str(tensor.dtype).removeprefix('torch.')} values is not whole; "
            "convert the tensor to a floating-point dtype, or ask for another reduction."
        )


class Collectives(abc.ABC):
    """Carries tensors and small objects between ranks; keeps the ``Coordinator`` protocol.

    Order of calls: ``connect`` once, anything else any number of times by all ranks in the same
    order, ``close`` once. An object that was closed can be connected again.
    """

    @classmethod
    def for_run(cls, *, backend: str | None, timeout: timedelta, guard_timeout: timedelta) -> Self:
        """Create collectives, unconnected, from the arguments of a run; by default none of them matters.

        Args:
            backend: The argument ``process_group_backend``.
            timeout: How long a collective of a training step may take.
            guard_timeout: How long to wait for a rank before naming it.
        """
        del backend, timeout, guard_timeout
        return cls()

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """This process's place in the world, from 0."""

    @property
    @abc.abstractmethod
    def world_size(self) -> int:
        """How many ranks there are."""

    @abc.abstractmethod
    def connect(self, rank: int, world_size: int, device: torch.device) -> None:
        """Join the other ranks; an existing process group is used and left alone at ``close``.

        Args:
            rank: This process's place.
            world_size: How many ranks will come.
            device: Where this rank's tensors live.

        Raises:
            MissingRank: If a rank does not come within the guard timeout.
        """

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor, group: Any = None, reduce_op: str = "mean") -> torch.Tensor:
        """Reduce a tensor over ranks into a new tensor, the same on each.

        Args:
            tensor: Any shape, the same on every rank.
            group: A process group; None for the whole world.
            reduce_op: ``"mean"``, ``"sum"``, ``"max"``, ``"min"`` or ``"product"``.

        Returns:
            A new tensor of the same shape and dtype; also of the same strides where ``tensor`` has no gaps or overlaps,
            so that an averaged gradient is laid out as its parameter, which torch's fused optimizers rely on.
        """

    @abc.abstractmethod
    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Collect a tensor from every rank.

        Args:
            tensor: Any shape, the same on every rank.
            group: A process group; None for the whole world.
            sync_grads: Whether gradients of the result flow back to the ranks the parts came from.

        Returns:
            A tensor of shape ``(ranks, *tensor.shape)``.
        """

    @abc.abstractmethod
    def broadcast_object(self, value: T, src: int = 0) -> T:
        """Return rank ``src``'s ``value`` on every rank.

        What Shard itself sends consists of the values that ``Coordinator`` lists, so nothing need be pickled here.
        """

    def broadcast_any(self, value: T, src: int = 0) -> T:
        """Return rank ``src``'s ``value``, an object of a user's, on every rank; it may be of any class.

        Where this is not implemented, ``broadcast_object`` carries it as far as it can.
        """
        return self.broadcast_object(value, src)

    @abc.abstractmethod
    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's ``value`` on every rank, in rank order."""

    @abc.abstractmethod
    def barrier(self, name: str = "barrier") -> None:
        """Wait for every rank; one that does not come is named within the guard timeout.

        Raises:
            MissingRank: Naming the ranks that did not come, on every rank that did.
        """

    @abc.abstractmethod
    def any_true(self, flag: bool) -> bool:
        """Return on every rank whether ``flag`` is true on any."""

    def side_channel(self) -> AbstractContextManager[Coordinator]:
        """Open a side channel to the same ranks, for a task that another thread does in the background.

        Raises:
            MissingCapability: If these collectives have none.
        """
        raise MissingCapability(
            f"{type(self).__name__} cannot talk in the background; save with blocking=True, or let the class implement "
            "side_channel()."
        )

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the other ranks and free what ``connect`` took; does nothing when not connected."""

    def abort(self) -> None:
        """Leave as ``close`` does, but by an error, on this rank perhaps alone: wait for no other rank.

        By default it is ``close``; a class whose ``close`` waits for the others overrides it.
        """
        self.close()
