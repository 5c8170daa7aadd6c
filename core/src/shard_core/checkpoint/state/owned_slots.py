"""Optimizer state that only the owner of a parameter keeps: what every rank must know of it to save and load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from shard_core.checkpoint.all_ranks import on_all_ranks
from shard_core.checkpoint.state.ownership import check_values
from shard_core.checkpoint.state.shard import TensorShard, shards_of_range
from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    from shard_core.checkpoint.state.named_state import HeldSlot
    from shard_core.checkpoint.state.optimizer_state import OptimizerTensors
    from shard_core.checkpoint.state.training_state import KeySpace, Slot
    from shard_core.coordinator import Coordinator

#: The shape and the dtype of each tensor of a parameter's state, by slot.
_Layout: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class OwnedSlots:
    """The layout and the scalars of state that stands on some ranks, known on all after one exchange.

    Args:
        optimizers: By the user's names; each holds the state of the parameters that this rank owns.
        coordinator: How ranks talk; every rank makes this object at the same time.

    Attributes:
        scalars: State of one element, by optimizer, parameter and slot.

    Raises:
        CheckpointError: On every rank, if some parameter has no owner, or an owner keeps what cannot be saved whole.
    """

    def __init__(self, optimizers: Mapping[str, OptimizerTensors], coordinator: Coordinator) -> None:
        self._optimizers = optimizers
        self._rank = coordinator.rank
        found = on_all_ranks(coordinator, "describing optimizer state", self._describe)
        self._owners: dict[tuple[str, str], int] = {}
        self._layouts: dict[tuple[str, str], _Layout] = {}
        self.scalars: dict[str, dict[str, Mapping[str, Any]]] = {key: {} for key in optimizers}
        for key, optimizer in optimizers.items():
            for name in optimizer.shapes:
                owner = next((rank for rank, kept in enumerate(found) if name in kept[key]), None)
                if owner is None:
                    raise CheckpointError(
                        f"no rank owns {name!r}, which optimizer {key!r} steps, so its state would be in no "
                        "checkpoint; let `owned` return True for it on one rank."
                    )
                self._owners[key, name] = owner
                self._layouts[key, name], scalars = found[owner][key][name]
                if scalars:
                    self.scalars[key][name] = scalars
        self._expected = dict(self._layouts)

    def expect(self, slots: Sequence[Slot]) -> None:
        """Note the state that owners create for a load, as ``OptimizerTensors.create_slots`` does.

        Args:
            slots: All the state the checkpoint holds.
        """
        self._expected = dict(self._layouts)
        for slot in slots:
            for key, optimizer in self._optimizers.items():
                if slot.module == optimizer.module and optimizer.shapes.get(slot.name) == slot.parameter_shape:
                    before = self._expected[key, slot.name]
                    self._expected[key, slot.name] = {slot.slot: (slot.shape, slot.dtype), **before}

    def shards(self, keys: KeySpace, held: Iterable[HeldSlot]) -> list[TensorShard]:
        """List the state of all parameters: whole where it stands, without elements elsewhere.

        Args:
            keys: How tensors are called in the checkpoint.
            held: What this rank keeps.
        """
        here = {slot.key: slot.tensor for slot in held}
        found = []
        for (owner, name), layout in self._expected.items():
            for slot in sorted(layout):
                shape, dtype = layout[slot]
                key = keys.slot(self._optimizers[owner].module, name, slot)
                if key not in here:
                    found += shards_of_range(key, shape, 0, torch.empty(0, dtype=dtype), write=False)
                    continue
                whole, is_first = here[key], self._owners[owner, name] == self._rank
                origin, view = (0,) * len(shape), whole.detach()
                found.append(
                    TensorShard(key=key, shape=shape, offsets=origin, view=view, write=is_first, stepped=whole)
                )
        return found

    def _describe(self) -> dict[str, dict[str, tuple[_Layout, Mapping[str, Any]]]]:
        described: dict[str, dict[str, tuple[_Layout, Mapping[str, Any]]]] = {}
        for key, optimizer in self._optimizers.items():
            layouts: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {name: {} for name in optimizer.kept}
            for name, slot, tensor in optimizer.tensors():
                check_values(f"{name}.{slot}", tensor)
                if isinstance(tensor, DTensor):
                    raise CheckpointError(
                        f"optimizer {key!r} keeps {slot!r} of {name!r} as a DTensor, which is no rank's own; leave "
                        "`owned` out, where it lies is known without."
                    )
                layouts[name][slot] = tuple(tensor.shape), tensor.dtype
            scalars = optimizer.record().scalars
            described[key] = {name: (layout, scalars.get(name, {})) for name, layout in layouts.items()}
        return described
