"""State dicts and full parameters of what is sharded over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.keys import OPTIMIZER, is_slot, name_in, slot_in
from shard_core.checkpoint.state.gather import full_tensors
from shard_core.strategy.collectives import StrategyCollectives

if TYPE_CHECKING:
    import torch

    from shard_core.checkpoint.state.training_state import TrainingState


class StrategyStateDict(StrategyCollectives):
    """Returns the weights and the optimizer state of a run, full or this rank's shards."""

    def module_state_dict(self, module: torch.nn.Module, full: bool = True) -> dict[str, torch.Tensor]:
        """Return a module's parameters and persistent buffers under the user's own names.

        Every rank calls this if ``full``; what is on a rank it may ask for alone.

        Args:
            module: What setup returned.
            full: Full tensors in host memory on rank 0 and nothing on other ranks; False for what
                is on this rank.

        Returns:
            Tensors by name; one that stands here in several boxes under ``name[begin:end,...]``, box by box.
        """
        known = self._registry.of(module)
        state = self.engine_state({"model": known.module}, {})
        if not full:
            return {name_in(label): view for label, view in _local_tensors(state)}
        whole = full_tensors(state, self.collectives)
        return {name_in(key): tensor for key, tensor in whole if self.is_global_zero}

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer, full: bool = True) -> dict[str, Any]:
        """Return an optimizer's state by parameter name, as torch's own state dicts do; every rank calls this.

        Args:
            optimizer: One that was set up.
            full: Full tensors in host memory on rank 0 and an empty dict on other ranks; False for
                what is on this rank.

        Returns:
            ``{"state": {name: {slot: value}}, "param_groups": [{"params": [name, ...], ...}]}``.
        """
        known = self._registry.owner(optimizer)
        state = self.engine_state({"model": known.module}, {"optimizer": optimizer})
        record = state.optimizers()["optimizer"]
        slots: dict[str, dict[str, Any]] = {}
        pairs = full_tensors(state, self.collectives, prefix=OPTIMIZER) if full else _local_tensors(state)
        for key, tensor in pairs:
            if is_slot(key):
                name, slot = slot_in(key)
                slots.setdefault(name, {})[slot] = tensor
        if full and not self.is_global_zero:
            return {}
        for name, scalars in record.scalars.items():
            slots.setdefault(name, {}).update(scalars)
        return {"state": slots, "param_groups": [dict(group) for group in record.groups]}

    def full_parameters(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a module's full parameters and buffers in host memory, a few at a time; every rank iterates to the end.

        Args:
            module: What setup returned.

        Yields:
            The user's name and the full tensor; memory is that of the largest, or of 16 MiB of small ones.
        """
        state = self.engine_state({"model": self._registry.of(module).module}, {})
        for key, tensor in full_tensors(state, self.collectives):
            yield name_in(key), tensor


def _local_tensors(state: TrainingState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's tensors by key; with extents where a tensor has several boxes here."""
    shards = state.shards()
    boxes = Counter(shard.key for shard in shards)
    for shard in shards:
        yield shard.key if boxes[shard.key] == 1 else shard.label, shard.view
