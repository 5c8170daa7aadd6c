"""The all-gather and reduce-scatter of ``fully_shard`` over gloo, in fewer bytes.

Gloo has no reduce-scatter: torch makes one of an all-reduce of a copy, which is twice the traffic (torch's pull request
118911), and it gathers into a buffer of its own before it copies that into place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from shard_core._versions import in_backward
from shard_core.collectives.process_group import translate_torch_errors
from shard_core.errors import SetupError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

#: Apart from what users send between two ranks themselves.
_TAG: Final = 7306
#: What ranks compare at the end of a backward, where they send nothing.
_AT_END: Final = -1
#: How many bytes travel before they are added up: more would be out of the caches by then, fewer is many messages.
_CHUNK_BYTES: Final = 8 * 2**20
#: As they are called since torch 2.13, and were before.
_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


def is_gloo(mesh: DeviceMesh) -> bool:
    """Return whether the ranks that shard a copy of a model exchange over gloo.

    Args:
        mesh: Ranks along one axis, or along two, of which the last shards.
    """
    group = mesh.get_group(mesh.ndim - 1)
    return mesh.device_type == "cpu" and "cpu:gloo" in dist.get_backend_config(group).split(",")


def use_gloo_comm(module: FSDPModule, mesh: DeviceMesh) -> None:
    """Set the collectives below on a module that was sharded.

    Args:
        module: The module, or a part of it that is a unit.
        mesh: Ranks along one axis, or all of the run along two, of which the last shards.
    """
    # The classes in torch's annotations are private; torch calls no more of them than is here.
    gather: Any = InPlaceGather(_reducing(mesh))
    kind = UnspreadScatter if mesh.ndim == 2 and mesh.size(1) == 1 else PairwiseScatter
    scatter: Any = kind(_reducing(mesh))
    module.set_custom_all_gather(gather)
    module.set_custom_reduce_scatter(scatter)


def end_backward(mesh: DeviceMesh) -> None:
    """Check that no rank gathers a unit or reduces its gradients any more, where all come to the end of a backward.

    Args:
        mesh: What ``use_gloo_comm`` was given.

    Raises:
        SetupError: On every rank, if one does.
    """
    if is_gloo(mesh) and mesh.size() > 1:
        _check_alike(_AT_END, _reducing(mesh))


def _reducing(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return all ranks that reduce the same gradients, those of other copies of the model among them."""
    group = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    assert group is not None
    return group


class _HeapAllocator:
    """Allocates the memory of messages as torch does."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory that a message is assembled in.

        Args:
            size: Its shape.
            dtype: Of its elements.
            device: Where it is.
        """
        return torch.empty(size, dtype=dtype, device=device)


class InPlaceGather(_HeapAllocator):
    """An all-gather in which each rank's shard arrives where it belongs.

    Args:
        reducing: All ranks that gather alike in a backward, as for ``PairwiseScatter``.
    """

    def __init__(self, reducing: dist.ProcessGroup | None = None) -> None:
        self._reducing = reducing

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather.

        Args:
            output_tensor: The shards of all ranks, one after the other.
            input_tensor: This rank's, which may lie in ``output_tensor`` already.
            group: The ranks.
            async_op: Whether the caller waits; then it is torch's own gather.
        """
        if async_op:
            work: dist.Work | None = _gather(output_tensor, input_tensor, group=group, async_op=True)
            return work
        if in_backward():  # in a forward ranks compare what they call
            _check_alike(2 * output_tensor.numel() + 1, self._reducing or group)
        if output_tensor.element_size() == 1:  # gloo does not know all of these dtypes
            output_tensor, input_tensor = (each.view(torch.uint8) for each in (output_tensor, input_tensor))
        shards = output_tensor.chunk(group.size()) if output_tensor.numel() else ()
        if shards and shards[group.rank()].data_ptr() != input_tensor.data_ptr():
            shards[group.rank()].copy_(input_tensor)
        with translate_torch_errors("a gather of parameters"):
            arriving = [
                dist.broadcast(shard, group=group, group_src=rank, async_op=True) for rank, shard in enumerate(shards)
            ]
            for work in arriving:
                work.wait()
        return None


class PairwiseScatter(_HeapAllocator):
    """A reduce-scatter in which each rank sends the others their parts and adds up what it is sent.

    Args:
        reducing: All ranks that reduce the same gradients, those of other copies of the model among them; None for
            those that each reduction is among.
    """

    def __init__(self, reducing: dist.ProcessGroup | None = None) -> None:
        self._reducing = reducing

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce, part by part in rank order.

        Args:
            output_tensor: This rank's part of the result.
            input_tensor: What this rank adds to the parts of all ranks, one after the other.
            group: The ranks.
            op: A sum or a mean; of anything else torch must know how.
            async_op: Whether the caller waits; then it is torch's own reduction.
        """
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            work: dist.Work | None = _scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
            return work
        size, rank = group.size(), group.rank()
        _check_alike(2 * input_tensor.numel(), self._reducing or group)
        parts = input_tensor.view(size, output_tensor.numel())
        width = min(max(_CHUNK_BYTES // (size * output_tensor.element_size()), 1), output_tensor.numel())
        room = output_tensor.new_empty(size, width)
        for start in range(0, output_tensor.numel(), max(width, 1)):
            mine = output_tensor[start : start + width]
            others = room[:, : mine.numel()]
            _swap(parts[:, start : start + width], others, group)
            terms = [parts[rank, start : start + width] if each == rank else others[each] for each in range(size)]
            if size > 1:
                torch.add(terms[0], terms[1], out=mine)
            else:
                mine.copy_(terms[0])
            for term in terms[2:]:
                mine.add_(term)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(size)
        return None


class UnspreadScatter(PairwiseScatter):
    """A reduction among copies of a model each of which one rank holds: torch calls it for memory alone."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Check, before what is allocated is reduced, that all ranks reduce as much."""
        assert self._reducing is not None
        _check_alike(2 * torch.Size(size).numel(), self._reducing)
        return super().allocate(size, dtype=dtype, device=device)


def _check_alike(come_to: int, group: dist.ProcessGroup) -> None:
    """Check that all ranks come to the same in a backward: gloo ends the process of who receives another message.

    Args:
        come_to: Twice the length of the message, one more where it gathers, or ``_AT_END``.
        group: The ranks.
    """
    everyone = torch.empty(group.size(), dtype=torch.int64)
    _gather(everyone, torch.tensor([come_to]), group=group)
    if int(everyone.min()) != int(everyone.max()):
        raise SetupError(
            "the losses of some ranks have used parameters of a unit that those of others have not, and this strategy "
            "sends gradients of several parameters as one message: let every rank's loss use them, were it times zero, "
            "leave them out of the units, so that the root's has them, or train under 'ddp'."
        )


def _swap(given: torch.Tensor, taken: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send each other rank its row, and receive from it what it has for this one."""
    size, rank = group.size(), group.rank()
    under_way = []
    for step in range(1, size):
        source, target = (rank - step) % size, (rank + step) % size
        under_way.append(dist.irecv(taken[source], group=group, group_src=source, tag=_TAG))
        under_way.append(dist.isend(given[target], group=group, group_dst=target, tag=_TAG))
    for work in under_way:
        if work is not None:
            work.wait()
