"""How user code talks across ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shard_core.capability import Capability
from shard_core.errors import CollectiveError, nearest
from shard_core.mesh import DATA_AXIS
from shard_core.strategy.stepping import Stepping

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Talking(Stepping):
    """Reduces, gathers and broadcasts; every rank makes the same calls in the same order."""

    def all_reduce(
        self, tensor: torch.Tensor | float, group: str | ProcessGroup | None = None, reduce_op: str = "mean"
    ) -> torch.Tensor:
        """Reduce a tensor over ranks into a new tensor, the same on each.

        Args:
            tensor: Any shape, the same on every rank; a number becomes a 0-d tensor.
            group: An axis of the device mesh, or a process group; None for all ranks. Every strategy has
                ``"data_parallel"``, the ranks that see different data.
            reduce_op: ``"mean"``, ``"sum"``, ``"max"``, ``"min"`` or ``"product"``.

        Returns:
            A new tensor of the same shape.
        """
        value = tensor if isinstance(tensor, torch.Tensor) else torch.tensor(tensor, device=self.root_device)
        return self.collectives.all_reduce(value, self._group(group), reduce_op)

    def reduce(self, tensor: T, group: str | ProcessGroup | None = None, reduce_op: str = "mean") -> T:
        """Reduce a tensor over ranks; anything else is returned as it is.

        Args:
            tensor: What to reduce.
            group: As for ``all_reduce``.
            reduce_op: As for ``all_reduce``.

        Returns:
            The reduced tensor on every rank.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return self.all_reduce(tensor, group, reduce_op)  # type: ignore[return-value]

    def all_gather(
        self, tensor: torch.Tensor, group: str | ProcessGroup | None = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Collect a tensor from every rank.

        Args:
            tensor: Any shape, the same on every rank.
            group: As for ``all_reduce``.
            sync_grads: Let gradients of the result flow back to the ranks the parts came from.

        Returns:
            A tensor of shape ``(ranks, *tensor.shape)``.
        """
        if sync_grads:
            self._require(Capability.SYNC_GRADS)
        return self.collectives.all_gather(tensor, self._group(group), sync_grads)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Hand an object of one rank to all.

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
        """Wait for every rank.

        Args:
            name: What the ranks meet for; shown when one does not come.

        Raises:
            MissingRank: Naming the ranks that did not come within ``guard_timeout``.
        """
        self.setup_environment()
        self.collectives.barrier(name or "barrier")

    def _group(self, group: str | ProcessGroup | None) -> Any:
        mesh = self.device_mesh
        if not isinstance(group, str):
            return group
        axes = (mesh.mesh_dim_names if mesh is not None else None) or ()
        if mesh is not None and group in axes:
            return mesh.get_group(group)
        if group == DATA_AXIS:
            return None  # without that axis every rank sees data of its own
        there = tuple(dict.fromkeys((DATA_AXIS, *axes)))
        hint = nearest(group, there) or "."
        raise CollectiveError(
            f"strategy {self.info.name!r} has no mesh axis {group!r}{hint} Its axes are: {', '.join(there)}."
        )
