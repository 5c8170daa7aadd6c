"""Training state made of tensors: plain ones, DTensors, and flat parts of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from shard_core.checkpoint.names import ModuleTensors
from shard_core.checkpoint.optimizer_state import OptimizerTensors
from shard_core.checkpoint.ownership import Ownership
from shard_core.checkpoint.shard import FlatPart, TensorShard, shards_of_range
from shard_core.checkpoint.state import KeySpace, Slot, TrainingState
from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from shard_core.checkpoint.optimizer_record import OptimizerRecord


class TensorState(TrainingState):
    """The state of modules whose parameters are plain tensors, DTensors or cut into flat parts.

    A plain tensor is taken for a copy of what every other rank holds. Of a parameter with a flat part, the part is
    saved and filled in its stead, and so is the state of the optimizer that steps the part.

    Args:
        modules: Modules by the user's names.
        optimizers: Optimizers over their parameters, by the user's names.
        rank: This rank.
        world_size: How many there are.
        mesh: The mesh of all ranks, needed where some tensors live on a part of it.
        flat_part: Tells what this rank holds of a parameter that is cut flat over all ranks; None for others.

    Raises:
        CheckpointError: If names clash, or an optimizer steps what no module here has.

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
    ) -> None:
        self._rank, self._world_size, self._mesh = rank, world_size, mesh
        self._modules = {key: ModuleTensors(key, module, flat_part) for key, module in modules.items()}
        self._keys = KeySpace(tuple(modules))
        self._optimizers = {
            key: OptimizerTensors(key, optimizer, self._modules) for key, optimizer in optimizers.items()
        }
        self._held: set[tuple[str, str, str]] = set()
        self._refuse_shared_parameters()

    @property
    def modules(self) -> Sequence[str]:
        """The user's names for the modules."""
        return tuple(self._modules)

    def shards(self) -> list[TensorShard]:
        """List this rank's part of every tensor, copies of replicas included."""
        ownership = Ownership(self._rank, self._world_size, self._mesh)
        shards = []
        for module, tensors in self._modules.items():
            for name, tensor in tensors.tensors.items():
                part = tensors.parts.get(name)
                key = self._keys.parameter(module, name)
                shards += _shards_of_part(key, part, part.values) if part else [ownership.shard(key, tensor)]
        for optimizer in self._optimizers.values():
            for name, slot, tensor in optimizer.tensors():
                part = self._modules[optimizer.module].parts.get(name)
                key = self._keys.slot(optimizer.module, name, slot)
                shards += _shards_of_part(key, part, tensor) if part else [ownership.shard(key, tensor)]
        return shards

    def aliases(self) -> dict[str, str]:
        """Give the further keys of tied parameters and buffers."""
        return {
            self._keys.parameter(module, alias): self._keys.parameter(module, name)
            for module, tensors in self._modules.items()
            for alias, name in tensors.aliases.items()
        }

    def optimizers(self) -> dict[str, OptimizerRecord]:
        """Describe the optimizers."""
        return {key: optimizer.record() for key, optimizer in self._optimizers.items()}

    def prepare_load(self, slots: Sequence[Slot]) -> None:
        """Make room for lazily made optimizer state."""
        self._held = {(slot.module, slot.name, slot.slot) for slot in slots}
        for optimizer in self._optimizers.values():
            optimizer.make_room(slots)

    def finish_load(self, optimizers: Sequence[OptimizerRecord]) -> None:
        """Bring scalars and hyper-parameters back."""
        for optimizer in self._optimizers.values():
            records = [record for record in optimizers if record.module == optimizer.module]
            held = {(name, slot) for module, name, slot in self._held if module == optimizer.module}
            optimizer.restore(records, held)

    def _refuse_shared_parameters(self) -> None:
        owners: dict[tuple[str, str], str] = {}
        for key, optimizer in self._optimizers.items():
            for name in sorted(optimizer.names):
                other = owners.setdefault((optimizer.module, name), key)
                if other != key:
                    raise CheckpointError(
                        f"optimizers {other!r} and {key!r} both step {name!r}; its state can be kept for one of them "
                        "only, give the parameter to one."
                    )


def _shards_of_part(key: str, part: FlatPart, values: torch.Tensor) -> list[TensorShard]:
    """Describe a part of a parameter, or the state an optimizer keeps of it."""
    # State of one element stands on every rank, and counts where the parameter's one element is.
    flat = values.detach().reshape(-1)[: part.values.numel()]
    return shards_of_range(key, part.shape, part.start, flat)
