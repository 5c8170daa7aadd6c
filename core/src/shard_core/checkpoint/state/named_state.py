"""Training state of modules whose tensors are known by name: all of it but the shards, which subclasses list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shard_core.checkpoint.state.optimizer_state import OptimizerTensors
from shard_core.checkpoint.state.training_state import KeySpace, Slot, TrainingState
from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from shard_core.checkpoint.state.names import NamedTensors
    from shard_core.checkpoint.state.optimizer_record import OptimizerRecord


class HeldSlot(NamedTuple):
    """A tensor of an optimizer's state as this process holds it.

    Attributes:
        key: Its name in a checkpoint.
        module: The user's name for the module.
        name: The parameter's name in it.
        slot: The state's name.
        tensor: What is held of it.
    """

    key: str
    module: str
    name: str
    slot: str
    tensor: torch.Tensor


class NamedState(TrainingState):
    """Training state of named tensors; a subclass lists the ``shards``.

    Args:
        modules: The modules' tensors by the user's names for the modules.
        optimizers: Optimizers over their parameters, by the user's names.
        zeros_like: Creates optimizer state of a parameter's layout, from it and a dtype; None for torch's.
        owned: Returns whether this rank keeps the state of a parameter; None if every rank does.

    Attributes:
        keys: How tensors are called in a checkpoint.

    Raises:
        CheckpointError: If an optimizer steps what no module here has, or two step the same.
    """

    def __init__(
        self,
        modules: Mapping[str, NamedTensors],
        optimizers: Mapping[str, torch.optim.Optimizer],
        zeros_like: Callable[[torch.Tensor, torch.dtype], torch.Tensor] | None = None,
        owned: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        self.keys = KeySpace(tuple(modules))
        self._named = modules
        self._optimizers = {
            key: OptimizerTensors(key, each, modules, zeros_like, owned) for key, each in optimizers.items()
        }
        self._held: set[tuple[str, str, str]] = set()
        self._refuse_shared_parameters()

    @property
    def modules(self) -> Sequence[str]:
        """The user's names for the modules."""
        return tuple(self._named)

    def slots(self) -> Iterator[HeldSlot]:
        """List the tensors of the optimizers' state."""
        for optimizer in self._optimizers.values():
            for name, slot, tensor in optimizer.tensors():
                key = self.keys.slot(optimizer.module, name, slot)
                yield HeldSlot(key, optimizer.module, name, slot, tensor)

    def aliases(self) -> dict[str, str]:
        """Return the further keys of tied parameters and buffers."""
        return {
            self.keys.parameter(module, alias): self.keys.parameter(module, name)
            for module, tensors in self._named.items()
            for alias, name in tensors.aliases.items()
        }

    def optimizers(self) -> dict[str, OptimizerRecord]:
        """Describe the optimizers."""
        return {key: optimizer.record() for key, optimizer in self._optimizers.items()}

    def prepare_load(self, slots: Sequence[Slot]) -> None:
        """Create state that the optimizers have not created yet."""
        self._held = {(slot.module, slot.name, slot.slot) for slot in slots}
        for optimizer in self._optimizers.values():
            optimizer.create_slots(slots)

    def check_load(self, optimizers: Sequence[OptimizerRecord]) -> None:
        """Check that scalars and hyper-parameters can be restored."""
        for optimizer in self._optimizers.values():
            optimizer.check([record for record in optimizers if record.module == optimizer.module])

    def finish_load(self, optimizers: Sequence[OptimizerRecord]) -> None:
        """Restore scalars and hyper-parameters."""
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
