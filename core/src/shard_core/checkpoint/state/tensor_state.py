"""Training state made of tensors: plain ones, DTensors, and flat parts of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch.nn import Parameter

from shard_core.checkpoint.state.named_state import NamedState
from shard_core.checkpoint.state.names import ModuleTensors
from shard_core.checkpoint.state.owned_slots import OwnedSlots
from shard_core.checkpoint.state.ownership import Ownership
from shard_core.checkpoint.state.shard import FlatPart, TensorShard, shards_of_range
from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from shard_core.checkpoint.state.optimizer_record import OptimizerRecord
    from shard_core.checkpoint.state.training_state import Slot
    from shard_core.coordinator import Coordinator


class TensorState(NamedState):
    """The state of modules whose parameters are plain tensors, DTensors or flat parts.

    A plain tensor is taken for a copy of what every other rank holds. Of a parameter with a flat part, the part is
    saved and filled in its stead, and so is the state of the optimizer that steps the part. Where an optimizer's state
    of a parameter, whole as the parameter is, stands on the ranks that own it alone, ``owned`` says which these are.

    Args:
        modules: Modules by the user's names.
        optimizers: Optimizers over their parameters, by the user's names.
        rank: This rank.
        world_size: How many there are.
        mesh: The mesh of all ranks, needed where some tensors live on a part of it.
        flat_part: Returns what this rank holds of a parameter that is sharded flat over all ranks; None for others.
        owned: Returns whether this rank keeps the optimizer's state of a parameter; at least one rank does. None if
            every rank keeps that of all, or of its shards. What owners have is known on all ranks after ``exchange``.

    Raises:
        CheckpointError: If names clash, an optimizer steps what no module here has, or ``owned`` comes with
            ``flat_part``: it is for whole parameters.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(2, 1, bias=False)
        >>> state = TensorState({"model": linear}, {}, rank=0, world_size=1)
        >>> [(shard.key, shard.box) for shard in state.shards()]
        [('model.weight', Box(offsets=(0, 0), sizes=(1, 2)))]
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        rank: int,
        world_size: int,
        mesh: DeviceMesh | None = None,
        flat_part: Callable[[torch.Tensor], FlatPart | None] | None = None,
        owned: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        self._rank, self._world_size, self._mesh = rank, world_size, mesh
        self._tensors = {key: ModuleTensors(key, module, flat_part) for key, module in modules.items()}
        super().__init__(self._tensors, optimizers, owned=owned)
        if owned is not None and flat_part is not None:
            raise CheckpointError("`owned` is for whole parameters and `flat_part` for parts of them; give one.")
        self._owned: OwnedSlots | None = None
        self._exchanges = owned is not None and bool(optimizers)

    def exchange(self, coordinator: Coordinator) -> None:
        """Exchange what owners have of optimizer state."""
        if self._exchanges:
            self._owned = OwnedSlots(self._optimizers, coordinator)

    def optimizers(self) -> dict[str, OptimizerRecord]:
        """Describe the optimizers, with the scalars that owners keep."""
        records = super().optimizers()
        self._check_exchanged()
        if self._owned is None:
            return records
        return {key: dataclasses.replace(each, scalars=self._owned.scalars[key]) for key, each in records.items()}

    def prepare_load(self, slots: Sequence[Slot]) -> None:
        """Create state that the optimizers have not created yet, where it belongs."""
        super().prepare_load(slots)
        if self._owned is not None:
            self._owned.expect(slots)

    def shards(self) -> list[TensorShard]:
        """List this rank's shard of every tensor, copies of replicas included."""
        self._check_exchanged()
        ownership = Ownership(self._rank, self._world_size, self._mesh)
        shards = []
        for module, tensors in self._tensors.items():
            for name, tensor in tensors.tensors.items():
                part, key = tensors.parts.get(name), self.keys.parameter(module, name)
                stepped = isinstance(tensor, Parameter)  # buffers change in forwards
                shards += (
                    _shards_of_part(key, part, part.values, part.alias)
                    if part
                    else [ownership.shard(key, tensor, stepped=stepped)]
                )
        if self._owned is not None:
            return [*shards, *self._owned.shards(self.keys, self.slots())]
        for held in self.slots():
            part = self._tensors[held.module].parts.get(held.name)
            shards += (
                _shards_of_part(held.key, part, held.tensor)
                if part
                else [ownership.shard(held.key, held.tensor, stepped=True)]
            )
        return shards

    def _check_exchanged(self) -> None:
        if self._exchanges and self._owned is None:
            raise CheckpointError("optimizer state is on its owners; call exchange(coordinator) on every rank first.")


def _shards_of_part(
    key: str, part: FlatPart, values: torch.Tensor, alias: torch.Tensor | None = None
) -> list[TensorShard]:
    """Describe a part of a parameter, or the state an optimizer keeps of it."""
    # State of one element stands on every rank, and counts where the parameter's one element is.
    flat = values.detach().reshape(-1)[: part.values.numel()]
    return shards_of_range(key, part.shape, part.start, flat, stepped=values if alias is None else alias)
