"""Collectives for user code: reduce, gather, broadcast, barrier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import torch

from shard_core.capability import Capability
from shard_core.collectives.interface import check_mean, reduce_op_named
from shard_core.collectives.leaves import Leaves
from shard_core.collectives.samples import SampleGather, exchange
from shard_core.errors import CollectiveError, nearest
from shard_core.mesh import DATA_AXIS
from shard_core.strategy.step import StrategyStep
from shard_core.structures import is_nested

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch.distributed import ProcessGroup, ReduceOp

    from shard_core.data import ShardedLoader

    Group: TypeAlias = str | ProcessGroup | None
    Reduction: TypeAlias = str | ReduceOp | ReduceOp.RedOpType | None
    Nested: TypeAlias = Mapping[Any, Any] | list[Any] | tuple[Any, ...] | DataclassInstance

T = TypeVar("T")


class StrategyCollectives(StrategyStep):
    """Reduces, gathers and broadcasts; every rank makes the same calls in the same order."""

    @overload
    def all_reduce(
        self, tensor: torch.Tensor | float, group: Group = None, reduce_op: Reduction = "mean"
    ) -> torch.Tensor: ...

    @overload
    def all_reduce(self, tensor: Nested, group: Group = None, reduce_op: Reduction = "mean") -> Any: ...

    def all_reduce(self, tensor: Any, group: Group = None, reduce_op: Reduction = "mean") -> Any:
        """Reduce a tensor over ranks into a new tensor, the same on each; of a structure, every leaf.

        Every rank of the group calls this.

        Args:
            tensor: Any shape, the same on every rank; a number becomes a 0-d tensor. Or dicts, lists, tuples and
                dataclasses of these, however deep, with the same keys on every rank.
            group: An axis of the device mesh, or a process group; None for all ranks. Every strategy has
                ``"data_parallel"``, the ranks that see different data.
            reduce_op: ``"mean"``, ``"sum"``, ``"max"``, ``"min"`` or ``"product"``, or the member of
                ``torch.distributed.ReduceOp``; None for the mean.

        Returns:
            A new tensor of the same shape, or the structure with such tensors.

        Raises:
            CollectiveError: If a leaf is neither, or ranks gave different structures; on every rank.
        """
        return self._reduced("all_reduce", tensor, group, reduce_op)

    def reduce(self, tensor: T, group: Group = None, reduce_op: Reduction = "mean") -> T:
        """Reduce a tensor or a structure as ``all_reduce`` does, by every rank's call; return other values as they are.

        Args:
            tensor: What to reduce.
            group: As for ``all_reduce``.
            reduce_op: As for ``all_reduce``.

        Returns:
            The reduced tensor or structure, on every rank.
        """
        op = reduce_op_named(reduce_op)
        if not (isinstance(tensor, torch.Tensor) or is_nested(tensor)):
            return tensor
        return self._reduced("reduce", tensor, group, op)  # type: ignore[no-any-return]

    @overload
    def all_gather(
        self, tensor: torch.Tensor | float, group: Group = None, sync_grads: bool = False
    ) -> torch.Tensor: ...

    @overload
    def all_gather(self, tensor: Nested, group: Group = None, sync_grads: bool = False) -> Any: ...

    def all_gather(self, tensor: Any, group: Group = None, sync_grads: bool = False) -> Any:
        """Collect a tensor from every rank of the group, each of which calls this; of a structure, every leaf.

        Args:
            tensor: As for ``all_reduce``.
            group: As for ``all_reduce``.
            sync_grads: Whether gradients of the result flow back to the ranks the parts came from.

        Returns:
            A tensor of shape ``(ranks, *tensor.shape)``, or the structure with such tensors.

        Raises:
            CollectiveError: As for ``all_reduce``.
        """
        if sync_grads:
            self._require(Capability.SYNC_GRADS)
        members = self._group(group)
        leaves = Leaves("all_gather", self.collectives, members, self.root_device)
        return leaves.map(tensor, lambda leaf: self.collectives.all_gather(leaf, members, sync_grads))

    def all_gather_object(self, obj: T) -> list[T]:
        """Collect an object from every rank; every rank calls this.

        JSON values, tuples, bytes, torch dtypes, tensors and arrays of numbers travel as by ``broadcast``, in lists,
        tuples and dicts of any depth to a hundred. Objects of other classes are refused: nothing is pickled.

        Args:
            obj: This rank's.

        Returns:
            All ranks' objects, in rank order, the same on every rank; copies.

        Raises:
            MissingRank: If a rank does not come within ``guard_timeout``.
            CollectiveError: If an object cannot be sent; on every rank.
        """
        self.barrier("all_gather_object")
        return exchange(obj, self.collectives, self.root_device)

    def gather_for_metrics(self, data: T, use_gather_object: bool = False, *, loader: ShardedLoader | None = None) -> T:
        """Collect what data ranks have computed of a batch, each sample of the data once; every rank calls this.

        The results of a loop over a loader of ``process_dataloader``, one after the other, are those of one process
        that draws batches of all ranks: in the order of the data, without the samples that fill the last round up.
        Ranks that see the same data count once.

        Args:
            data: Of this rank's batch, a tensor whose first dimension is the samples, a list of one object per sample,
                as ``all_gather_object`` takes them, or dicts, lists, tuples and dataclasses of these.
            use_gather_object: True if it is a list of one object per sample and these hold tensors.
            loader: The loader the batch is from; None for the one drawn from last, of those being iterated over.

        Returns:
            The structure with the samples of all data ranks, without gradients; the same on every rank.

        Raises:
            CollectiveError: If no loop over a loader is running, or ``data`` is none of these, has not as many samples
                as the batch, or is not alike on all ranks; on every rank.
        """
        self.setup_environment()
        which = "no loader of process_dataloader was" if loader is None else "the loader was not"
        drawn = self._rounds.last(loader) or (
            f"gather_for_metrics was called on rank {self.global_rank} while {which} iterated over, so which samples "
            "fill the last batch up is not known; call it for each batch inside the loop, or all_gather for other data."
        )
        gather = SampleGather(self.collectives, self._data, self.root_device)
        return gather.gather(data, drawn, objects=use_gather_object)  # type: ignore[no-any-return]  # as was given

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Broadcast an object of one rank to all; every rank calls this.

        JSON values, tuples, bytes, tensors and arrays of numbers travel as such: dense tensors come to this rank's
        device if they were on one, elements in order. An object that consists of anything else is pickled.

        Args:
            obj: Anything picklable; only rank ``src``'s counts.
            src: Whose.

        Returns:
            Rank ``src``'s object.

        Raises:
            MissingRank: If a rank does not come within ``guard_timeout``.
            CollectiveError: If the object cannot be sent.
        """
        self.barrier("broadcast")
        return self.collectives.broadcast_any(obj, src)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has called this.

        Args:
            name: What the ranks meet for; shown when one does not come.

        Raises:
            MissingRank: Naming the ranks that did not come within ``guard_timeout``.
        """
        self.setup_environment()
        self.collectives.barrier(name or "barrier")

    def _reduced(self, verb: str, tensor: Any, group: Group, reduce_op: Reduction) -> Any:
        op, members = reduce_op_named(reduce_op), self._group(group)
        leaves = Leaves(verb, self.collectives, members, self.root_device)
        return leaves.map(
            tensor,
            lambda leaf: self.collectives.all_reduce(leaf, members, op),
            check=lambda leaf: check_mean(op, leaf),
        )

    def _group(self, group: Group) -> Any:
        mesh = self.device_mesh
        if not isinstance(group, str):
            return group
        axes = (mesh.mesh_dim_names if mesh is not None else None) or ()
        if mesh is not None and group in axes:
            return mesh.get_group(group)
        if group == DATA_AXIS:
            return None  # without that axis every rank sees data of its own
        there = tuple(dict.fromkeys((DATA_AXIS, *axes)))
        is_op = group in ("sum", "mean", "avg", "max", "min", "product")
        hint = f"; for a reduction give reduce_op={group!r}." if is_op else nearest(group, there) or "."
        raise CollectiveError(
            f"strategy {self.info.name!r} has no mesh axis {group!r}{hint} Its axes are: {', '.join(there)}."
        )
