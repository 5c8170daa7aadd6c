"""Training state of which only some tensors are saved: those a filter keeps, or those that are not frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from shard_core.checkpoint.keys import is_slot, model_key, slot_in
from shard_core.checkpoint.state.training_state import KeySpace, Slot, TrainingState

if TYPE_CHECKING:
    from shard_core.checkpoint.state.optimizer_record import OptimizerRecord
    from shard_core.checkpoint.state.shard import TensorShard


class FilteredState(TrainingState):
    """Another state without the tensors a filter leaves out.

    An optimizer loses the parameters that lose any tensor of theirs, so that a load never takes half of
    a parameter's state for all of it.

    Args:
        state: The whole state.
        chosen: Returns whether a tensor is kept, by its key; the same on every rank.
    """

    def __init__(self, state: TrainingState, chosen: Callable[[str], bool]) -> None:
        self._state = state
        self._chosen = chosen
        self.holds_copies = state.holds_copies

    @property
    def modules(self) -> Sequence[str]:
        """The user's names for the modules."""
        return self._state.modules

    def shards(self) -> list[TensorShard]:
        """List the boxes of the tensors that are kept."""
        return [shard for shard in self._state.shards() if self._chosen(shard.key)]

    def aliases(self) -> dict[str, str]:
        """Return the further keys of the tied tensors that are kept."""
        return {alias: key for alias, key in self._state.aliases().items() if self._chosen(key)}

    def optimizers(self) -> dict[str, OptimizerRecord]:
        """Describe what is left of the optimizers."""
        keys = KeySpace(self._state.modules)
        left_out = {shard.key for shard in self._state.shards() if not self._chosen(shard.key)}
        owners = {model_key(slot_in(key)[0]) if is_slot(key) else key for key in left_out}
        records = {}
        for key, record in self._state.optimizers().items():
            kept = {name for name in record.names if keys.parameter(record.module, name) not in owners}
            groups = [{**g, "params": [n for n in g["params"] if n in kept]} for g in record.groups]
            scalars = {name: slots for name, slots in record.scalars.items() if name in kept}
            if kept:
                records[key] = dataclasses.replace(record, groups=groups, scalars=scalars)
        return records

    def prepare_load(self, slots: Sequence[Slot]) -> None:
        """Prepare the whole state."""
        self._state.prepare_load(slots)

    def check_load(self, optimizers: Sequence[OptimizerRecord]) -> None:
        """Check scalars and hyper-parameters against the whole state."""
        self._state.check_load(optimizers)

    def finish_load(self, optimizers: Sequence[OptimizerRecord]) -> None:
        """Restore scalars and hyper-parameters of the whole state."""
        self._state.finish_load(optimizers)


class TrainedState(FilteredState):
    """Another state without the parameters that are frozen, which a load leaves as they are.

    Optimizers keep the names of what they were given, so that they are resumed as they were.

    Args:
        state: The whole state.
        frozen: The keys of the frozen parameters, those of ties included; the same on every rank.
    """

    def __init__(self, state: TrainingState, frozen: Collection[str]) -> None:
        self._frozen = frozenset(frozen)
        super().__init__(state, lambda key: self._parameter(key) not in self._frozen)

    def optimizers(self) -> dict[str, OptimizerRecord]:
        """Describe the optimizers without what they keep of frozen parameters."""
        keys = KeySpace(self._state.modules)
        records = {}
        for key, record in self._state.optimizers().items():
            scalars = {
                name: slots
                for name, slots in record.scalars.items()
                if keys.parameter(record.module, name) not in self._frozen
            }
            records[key] = dataclasses.replace(record, scalars=scalars)
        return records

    @staticmethod
    def _parameter(key: str) -> str:
        """Return the key of the tensor, or of the parameter whose state it is."""
        return model_key(slot_in(key)[0]) if is_slot(key) else key
