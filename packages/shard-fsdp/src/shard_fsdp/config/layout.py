"""How ranks are arranged: which of them shard a copy of the model, and how many copies there are."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from shard_core import InvalidOption
from shard_core.plugins import DATA_AXIS, FullyShardOptions, MeshShape, arranged, nearest, option

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import ShardingStrategy

REPLICATE_AXIS: Final = "replicate"
"""The axis whose ranks hold the same shards."""

SHARD_AXIS: Final = "shard"
"""The axis whose ranks share one copy of the model."""

Sizes: TypeAlias = "tuple[int | Literal['auto'], int | Literal['auto']]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arrangement:
    """What a word of torch's older wrapper stands for.

    Attributes:
        sizes: Ranks along the two axes; None for one axis of all ranks.
        reshard_after_forward: As ``fully_shard`` takes it.
    """

    sizes: Sizes | None = None
    reshard_after_forward: bool | None = None


_COPY_PER_HOST: Final = ("auto", "auto")

_ARRANGEMENTS: Final = {
    "FULL_SHARD": _Arrangement(),
    "SHARD_GRAD_OP": _Arrangement(reshard_after_forward=False),
    "HYBRID_SHARD": _Arrangement(sizes=_COPY_PER_HOST),
    "_HYBRID_SHARD_ZERO2": _Arrangement(sizes=_COPY_PER_HOST, reshard_after_forward=False),
    "NO_SHARD": _Arrangement(sizes=("auto", 1), reshard_after_forward=False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutOptions(FullyShardOptions):
    """Options that say how ranks share the model.

    Raises:
        InvalidOption: If a value has the wrong type, or contradicts another.

    Example:
        >>> LayoutOptions(sharding_strategy="SHARD_GRAD_OP").reshards
        False
        >>> LayoutOptions(sharding_strategy="FULL_SHARD", device_mesh=(2, 4))
        Traceback (most recent call last):
        ...
        shard_core.errors.InvalidOption: sharding_strategy 'FULL_SHARD' makes one copy over all ranks, but device_mesh \
(2, 4) has an axis of copies; leave one of them out.
    """

    sharding_strategy: str | ShardingStrategy | None = option(
        None,
        "FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, _HYBRID_SHARD_ZERO2 or NO_SHARD, as torch's wrapper has them; None "
        "follows the options below",
    )
    device_mesh: tuple[int | Literal["auto"], int | Literal["auto"]] | DeviceMesh | None = option(
        None,
        "(copies, ranks that shard each), either or both of them 'auto'; or torch's mesh of all ranks; None makes one "
        "copy",
    )

    def __post_init__(self) -> None:
        """Check types and values."""
        super().__post_init__()
        if self.device_mesh is not None:
            object.__setattr__(self, "device_mesh", _checked_mesh(self.device_mesh))
        if self.sharding_strategy is not None:
            name = getattr(self.sharding_strategy, "name", self.sharding_strategy)
            object.__setattr__(self, "sharding_strategy", _checked_strategy(name))
            self._check_agreement()

    @property
    def reshards(self) -> bool | None:
        """Return the ``reshard_after_forward`` of ``fully_shard``."""
        if self.reshard_after_forward is None:
            return self._arrangement.reshard_after_forward
        return self.reshard_after_forward

    @property
    def has_copies(self) -> bool:
        """Return whether there is an axis of copies, however many ranks it has."""
        mesh = self.device_mesh or self._arrangement.sizes
        return mesh is not None and (isinstance(mesh, tuple) or mesh.ndim == 2)

    def build_mesh(self, device_type: str, ranks_per_host: int, timeout: timedelta) -> DeviceMesh:
        """Arrange the ranks of the default process group; every rank calls this.

        Args:
            device_type: ``"cpu"`` or ``"cuda"``.
            ranks_per_host: How many of them stand on this host.
            timeout: How long a collective along one axis may take.

        Returns:
            A mesh with one axis, of data, or with the axes of copies and shards.

        Raises:
            InvalidOption: If sizes do not fit the number of ranks.
        """
        asked = self.device_mesh or self._arrangement.sizes
        if asked is None:
            return MeshShape({DATA_AXIS: "auto"}).build(device_type)
        if not isinstance(asked, tuple):
            return _with_our_axes(asked, device_type, timeout)
        copies, ranks = asked if asked != _COPY_PER_HOST else ("auto", ranks_per_host)
        return MeshShape({REPLICATE_AXIS: copies, SHARD_AXIS: ranks}).build(device_type, timeout)

    @property
    def _arrangement(self) -> _Arrangement:
        return _ARRANGEMENTS[str(self.sharding_strategy or "FULL_SHARD")]

    def _check_agreement(self) -> None:
        strategy, mesh = self.sharding_strategy, self.device_mesh
        frees = self._arrangement.reshard_after_forward is None
        if self.reshard_after_forward is not None and self.reshard_after_forward != frees:
            what = "frees whole parameters between forward and backward" if frees else "keeps whole parameters"
            raise InvalidOption(
                f"sharding_strategy {strategy!r} {what}, but reshard_after_forward is {self.reshard_after_forward}; "
                "leave one of them out."
            )
        if strategy == "NO_SHARD" and mesh is not None:
            raise InvalidOption("sharding_strategy 'NO_SHARD' leaves no choice to device_mesh; leave one of them out.")
        if mesh is not None and self.has_copies != (self._arrangement.sizes is not None):
            made, has = "a copy on each host", "no axis of copies"
            if self.has_copies:
                made, has = "one copy over all ranks", "an axis of copies"
            raise InvalidOption(
                f"sharding_strategy {strategy!r} makes {made}, but device_mesh {mesh} has {has}; leave one of them out."
            )


def _checked_strategy(name: object) -> str:
    if not isinstance(name, str) or name.upper() not in _ARRANGEMENTS:
        hint = nearest(str(name), _ARRANGEMENTS) or ";"
        raise InvalidOption(f"sharding_strategy is {name!r}{hint} it can be: {', '.join(_ARRANGEMENTS)}.")
    return name.upper()


def _checked_mesh(mesh: Any) -> Sizes | DeviceMesh:
    if isinstance(mesh, tuple | list):
        if len(mesh) == 2 and all(size == "auto" or _is_count(size) for size in mesh):
            return mesh[0], mesh[1]
    else:
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(mesh, DeviceMesh) and mesh.ndim in (1, 2):
            return mesh
    raise InvalidOption(
        f"device_mesh is {mesh!r}; give (copies, ranks that shard each), such as (2, 'auto'), or a torch DeviceMesh "
        "with one or two axes."
    )


def _with_our_axes(mesh: DeviceMesh, device_type: str, timeout: timedelta) -> DeviceMesh:
    """Rename the axes of a user's mesh; ranks stay where they are."""
    import torch.distributed as dist

    if mesh.size() != dist.get_world_size():
        raise InvalidOption(
            f"device_mesh spans {mesh.size()} of {dist.get_world_size()} ranks; give a mesh of all of them."
        )
    if any(bool((mesh.mesh.diff(dim=axis) < 0).any()) for axis in range(mesh.ndim)):
        raise InvalidOption(
            f"device_mesh is {mesh.mesh.tolist()}; let ranks ascend along each axis, as they do in torch's groups."
        )
    names = (DATA_AXIS,) if mesh.ndim == 1 else (REPLICATE_AXIS, SHARD_AXIS)
    return arranged(mesh.mesh, names, device_type, timeout)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
