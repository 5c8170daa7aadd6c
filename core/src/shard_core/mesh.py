"""Device meshes: the sizes of named axes along which ranks are arranged, and this rank's place on the data axis."""

from __future__ import annotations

import dataclasses
import math
import weakref
from typing import TYPE_CHECKING, Any, Final, Literal

from shard_core.errors import InvalidOption, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    _Subgroups = tuple[tuple[tuple[int, ...], ...], timedelta | None]

#: The process groups that were made, for each world: the ranks of each subgroup, and the timeout.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Subgroups, dist.ProcessGroup]] = weakref.WeakKeyDictionary()

DATA_AXIS: Final = "data_parallel"
"""The axis whose ranks see different data; ranks that differ along other axes see the same."""


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How many ranks stand along each named axis, slowest-varying axis first.

    Attributes:
        axes: Sizes by name; one of them may be ``"auto"`` and is filled from the world size.

    Raises:
        InvalidOption: If a size is not a positive number, or more than one is ``"auto"``.

    Example:
        >>> shape = MeshShape({"data_parallel": "auto", "tensor_parallel": 2}).fitted(6)
        >>> shape
        MeshShape(data_parallel=3, tensor_parallel=2)
        >>> shape.size("tensor_parallel")
        2
        >>> MeshShape({"data_parallel": 2, "tensor_parallel": 2}).fitted(6)
        Traceback (most recent call last):
        ...
        shard_core.errors.InvalidOption: a mesh of data_parallel=2, tensor_parallel=2 needs 4 ranks, but \
there are 6; data_parallel=3 or tensor_parallel=3 would fit.
    """

    axes: Mapping[str, int | Literal["auto"]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", dict(self.axes))
        if not self.axes:
            raise InvalidOption("a mesh needs at least one axis, such as data_parallel.")
        for name, size in self.axes.items():
            if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise InvalidOption(f"mesh axis {name!r} has size {size!r}; it takes a number from 1, or 'auto'.")
        if len(self._open) > 1:
            raise InvalidOption(
                f"the mesh axes {' and '.join(map(repr, self._open))} are both 'auto'; give the size of all but one."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes.items())

    @property
    def names(self) -> tuple[str, ...]:
        """The axes, in order."""
        return tuple(self.axes)

    def fitted(self, world_size: int) -> MeshShape:
        """Fill the open axis so that the mesh holds every rank.

        Args:
            world_size: How many ranks there are.

        Returns:
            The shape with numbers only.

        Raises:
            InvalidOption: If the sizes do not multiply to ``world_size``; names what would.
        """
        if self._open:
            (name,) = self._open
            if world_size % self._known:
                raise InvalidOption(
                    f"a mesh of {self} needs a multiple of {self._known} ranks, but there are {world_size}"
                    f"{self._what_fits(world_size)}."
                )
            return MeshShape({**self.axes, name: world_size // self._known})
        if self._known != world_size:
            raise InvalidOption(
                f"a mesh of {self} needs {self._known} {'rank' if self._known == 1 else 'ranks'}, but there "
                f"{'is' if world_size == 1 else 'are'} {world_size}{self._what_fits(world_size)}."
            )
        return self

    def size(self, axis: str) -> int | Literal["auto"]:
        """Return how many ranks stand along an axis.

        Args:
            axis: Its name.

        Raises:
            InvalidOption: If there is no such axis; names the nearest.
        """
        if axis not in self.axes:
            raise InvalidOption(
                f"the mesh has no axis {axis!r}{nearest(axis, self.axes) or ';'} its axes are: {', '.join(self.axes)}."
            )
        return self.axes[axis]

    def build(self, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
        """Build a mesh of the ranks of the default process group; every rank calls this.

        Args:
            device_type: ``"cpu"``, ``"cuda"``, ...
            timeout: How long a collective along one axis may take; None for torch's own default.

        Returns:
            The mesh, its dimensions named as the axes are.

        Raises:
            InvalidOption: If the sizes do not multiply to the world size.
        """
        import torch
        import torch.distributed as dist

        shape = self.fitted(dist.get_world_size())
        sizes = [size for size in shape.axes.values() if size != "auto"]
        return arranged(torch.arange(dist.get_world_size()).view(sizes), shape.names, device_type, timeout)

    @property
    def _open(self) -> list[str]:
        return [name for name, size in self.axes.items() if size == "auto"]

    @property
    def _known(self) -> int:
        return math.prod(size for size in self.axes.values() if size != "auto")

    def _what_fits(self, world_size: int) -> str:
        """List, for each axis, the size that would fit if the others stay."""
        fits = [
            f"{name}={world_size * size // self._known}"
            for name, size in self.axes.items()
            if size != "auto" and not world_size % (self._known // size)
        ]
        return f"; {' or '.join(fits)} would fit" if fits else f"; start a multiple of {self._known} ranks"


def arranged(
    ranks: torch.Tensor, names: tuple[str, ...], device_type: str, timeout: timedelta | None = None
) -> DeviceMesh:
    """Build a mesh from the ranks' positions along its axes; every rank calls this.

    Torch's own constructors give the groups along an axis the default timeout, whatever that of the world is.

    Args:
        ranks: All of them, one dimension per axis.
        names: The names of the axes.
        device_type: ``"cpu"``, ``"cuda"``, ...
        timeout: How long a collective along one axis may take; None for torch's own default.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if ranks.dim() == 1:
        return DeviceMesh(device_type, ranks, mesh_dim_names=names)
    subgroups = [ranks.movedim(axis, -1).reshape(-1, size).tolist() for axis, size in enumerate(ranks.shape)]
    groups = [_group(each, timeout) for each in subgroups]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def _group(subgroups: list[list[int]], timeout: timedelta | None) -> dist.ProcessGroup:
    """Return this rank's group of those along one axis; one that was made before serves again.

    A group has threads and sockets and could not be left: torch caches layouts, and with them the groups of meshes
    that are gone, for others that look the same.
    """
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, {})
    key = tuple(map(tuple, subgroups)), timeout
    if key not in made:
        made[key], _ = dist.new_subgroups_by_enumeration(subgroups, timeout=timeout)
    return made[key]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataRanks:
    """This rank's place among those that see different data.

    Attributes:
        rank: Its place, from 0.
        size: How many they are.
        group: Their process group; None where they are the whole world.
    """

    rank: int
    size: int
    group: Any = None

    @classmethod
    def along(cls, mesh: DeviceMesh | None, rank: int, world_size: int) -> DataRanks:
        """Find them on a mesh.

        Args:
            mesh: The mesh; None, or one without the data axis, means every rank sees data of its own.
            rank: This process's place in the world.
            world_size: How many ranks there are.

        Example:
            >>> DataRanks.along(None, 1, 4)
            DataRanks(rank=1, size=4, group=None)
        """
        if mesh is None or DATA_AXIS not in (mesh.mesh_dim_names or ()):
            return cls(rank=rank, size=world_size)
        group = mesh.get_group(DATA_AXIS) if mesh.ndim > 1 else None
        return cls(rank=mesh.get_local_rank(DATA_AXIS), size=mesh[DATA_AXIS].size(), group=group)
