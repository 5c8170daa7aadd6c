"""Ownership: which box of a full tensor a rank holds, and which rank saves which copy of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from shard_core.checkpoint.format.box import Box
from shard_core.checkpoint.state.shard import TensorShard
from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


def local_box(tensor: DTensor, key: str) -> Box:
    """Return which box of a distributed tensor this rank holds.

    Args:
        tensor: Any distributed tensor.
        key: Its name, for messages.

    Raises:
        CheckpointError: If its layout is none of boxes.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise CheckpointError(f"{key!r} lives on other ranks than this one; every rank must hold a shard or a copy.")
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    for axis, dim in _sharded_dims(tensor.placements, key):
        size = -(-sizes[dim] // tensor.device_mesh.size(axis))
        start = min(size * coordinate[axis], sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(size, sizes[dim] - start)
    local = tensor.to_local()
    if not local.numel() and 0 in sizes:
        return Box(tuple(offsets), tuple(local.shape))  # where nothing is left, engines differ in what shape it has
    box = Box(tuple(offsets), tuple(sizes))
    if box.sizes != tuple(local.shape):
        raise CheckpointError(
            f"{key!r} is laid out as {tensor.placements} in a way that is not understood: this rank's shard has shape "
            f"{tuple(local.shape)}, not {box.sizes}."
        )
    return box


def _sharded_dims(placements: tuple[Placement, ...], key: str) -> Iterator[tuple[int, int]]:
    """Yield (mesh axis, tensor dim) in the order in which the dim was split."""
    late = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise CheckpointError(f"{key!r} is laid out as {placement}, which is a pending sum, not a value.")
        # FSDP over tensor parallelism splits a dim along the later axis first. Its placement has no public
        # class; it differs from Shard by its count of the splits made before it.
        if isinstance(placement, Shard) and not hasattr(placement, "split_factor"):
            yield axis, dim
        elif hasattr(placement, "split_factor"):
            late.append((axis, dim))
        else:
            raise CheckpointError(f"{key!r} is laid out as {placement}, which no box describes.")
    yield from reversed(late)


@dataclasses.dataclass(frozen=True)
class Copies:
    """The equal copies of a tensor's local shard, one per place along some axes of the whole mesh.

    Attributes:
        axes: Those axes; the world as one axis is ``None``.
        sizes: The axes' sizes.
        place: This rank's copy, counted from 0.
    """

    axes: tuple[int, ...] | None
    sizes: tuple[int, ...]
    place: int


class Ownership:
    """Decides which rank saves which copy; every rank comes to the same answer.

    Copies of what an optimizer steps are equal and are saved by ranks in turn, evenly by bytes. Those of buffers may
    have been changed by forwards on samples of the rank's own: the first is saved, so that all are of one rank.

    Args:
        rank: This rank.
        world_size: How many there are.
        mesh: The mesh of all ranks; None if tensors are plain or each distributed over all ranks.
    """

    def __init__(self, rank: int, world_size: int, mesh: DeviceMesh | None = None) -> None:
        self._rank = rank
        self._world_size = world_size
        self._mesh = mesh
        self._loads: dict[Any, list[int]] = {}
        # Computed once for all tensors laid out alike: it takes longer than all else about a tensor.
        self._layouts: dict[tuple[Any, ...], tuple[Box, Copies]] = {}
        self._fixed_axes: dict[DeviceMesh, list[int]] = {}

    @torch.no_grad()  # the local tensor of a DTensor that requires a gradient is otherwise made by autograd
    def shard(self, key: str, tensor: torch.Tensor, *, stepped: bool = False) -> TensorShard:
        """Describe this rank's shard of a tensor.

        Args:
            key: The tensor's name. Every rank asks for the same tensors in the same order.
            tensor: A plain tensor, of which each rank has a copy, or a distributed one.
            stepped: Whether nothing but an optimizer's step changes it, so that all copies are equal.

        Raises:
            CheckpointError: If the tensor holds no values that could be saved, or is laid out oddly.
        """
        check_values(key, tensor)
        if isinstance(tensor, DTensor):
            local = tensor.to_local().detach()
            box, copies = self._layout(key, tensor, tuple(local.shape))
        else:
            box, local = Box.whole(tensor.shape), tensor.detach()
            copies = Copies(axes=None, sizes=(self._world_size,), place=self._rank)
        shards = self._world_size // math.prod(copies.sizes)
        owner = self._owner(copies, tensor.numel() * tensor.element_size() // shards, in_turn=stepped)
        return TensorShard(
            key=key,
            shape=tuple(tensor.shape),
            offsets=box.offsets,
            view=local,
            write=owner == copies.place,
            stepped=tensor if stepped else None,
        )

    def _owner(self, copies: Copies, size: int, *, in_turn: bool) -> int:
        # Loads are counted per kind of layout: only ranks that hold copies of one shard need to agree.
        loads = self._loads.setdefault((copies.axes, copies.sizes), [0] * math.prod(copies.sizes))
        owner = loads.index(min(loads)) if in_turn else 0
        loads[owner] += size
        return owner

    def _layout(self, key: str, tensor: DTensor, local: tuple[int, ...]) -> tuple[Box, Copies]:
        # Some torch versions hold a placement equal to one of another class that splits otherwise.
        placements = tuple((type(placement), placement) for placement in tensor.placements)
        kind = tensor.device_mesh, placements, tensor.shape, local
        if kind not in self._layouts:
            self._layouts[kind] = local_box(tensor, key), self._copies(key, tensor)
        return self._layouts[kind]

    def _copies(self, key: str, tensor: DTensor) -> Copies:
        mesh = tensor.device_mesh if self._mesh is None else self._mesh
        if mesh.size() != self._world_size:
            raise CheckpointError(
                f"{key!r} lives on a mesh of {mesh.size()} of {self._world_size} ranks; say on which mesh all ranks "
                "stand, so that copies are saved once."
            )
        replicated = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
        inner = [(tensor.device_mesh, axis) for axis in replicated]
        if tensor.device_mesh not in self._fixed_axes:
            self._fixed_axes[tensor.device_mesh] = _fixed_axes(mesh, tensor.device_mesh)
        outer = [(mesh, axis) for axis in self._fixed_axes[tensor.device_mesh]]
        sizes, place = [], 0
        for where, axis in outer + inner:
            coordinate = where.get_coordinate()
            assert coordinate is not None  # local_box has looked
            sizes.append(where.size(axis))
            place = place * where.size(axis) + coordinate[axis]
        axes = (*(axis for _, axis in outer), -1, *(axis for _, axis in inner))
        return Copies(axes=axes, sizes=tuple(sizes), place=place)


def _fixed_axes(mesh: DeviceMesh, submesh: DeviceMesh) -> list[int]:
    """List the axes of the whole mesh along which a submesh does not extend."""
    inside = torch.isin(mesh.mesh, submesh.mesh).nonzero()
    return [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1 and len(inside[:, axis].unique()) == 1]


def check_values(key: str, tensor: torch.Tensor) -> None:
    """Check that a tensor's elements can be saved.

    Args:
        key: What to call it.
        tensor: The tensor.

    Raises:
        CheckpointError: If it has none, or is not dense.
    """
    if tensor.is_meta:
        raise CheckpointError(
            f"{key!r} is on the meta device and has no values; only what was set up or filled can be saved."
        )
    if tensor.layout is not torch.strided:
        raise CheckpointError(f"{key!r} has layout {tensor.layout}; only dense tensors can be saved, call to_dense().")
