"""Saving, loading, and looking at what is spread over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shard_core.checkpoint.assembly import full_tensors
from shard_core.checkpoint.contents import Contents
from shard_core.strategy.talking import Talking

if TYPE_CHECKING:
    import os

    from shard_core.checkpoint.interface import SaveHandle

#: Under which key a checkpoint keeps the state of the precision: the gradient scaler's.
PRECISION_KEY = "shard_precision"


class Remembering(Talking):
    """Writes and reads checkpoints that every strategy and world size reads."""

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        *,
        storage_options: Mapping[str, Any] | None = None,
        filter: Callable[[str], bool] | None = None,
        state_dict_type: str | None = None,
        blocking: bool = True,
    ) -> SaveHandle:
        """Write a checkpoint; every rank calls this.

        Args:
            path: A folder to be made; one that exists is replaced only when the new one is complete.
            state: Modules, optimizers, anything with ``state_dict`` and ``load_state_dict``, and JSON
                values, by keys of your choice.
            storage_options: For the storage the path names.
            filter: Tells by its key, such as ``model.head.weight``, whether a tensor is written.
            state_dict_type: ``"sharded"`` (the default) or ``"full"``.
            blocking: Whether to return only when the checkpoint is complete.

        Returns:
            A handle to wait on.

        Raises:
            CheckpointError: If it cannot be written; one that existed is still there.
            MissingRank: If a rank does not come within ``guard_timeout``.
        """
        self.barrier(f"save_checkpoint of {path}")
        contents = self._contents(state)
        return self.checkpoint_io.save(
            path,
            self.engine_state(contents.modules, contents.optimizers),
            contents.values(),
            coordinator=self.collectives,
            information={
                "strategy": self.info.name,
                "precision": self.precision.policy.name,
                "options": str(self.config),
            },
            storage_options=storage_options,
            filter=filter,
            state_dict_type=state_dict_type,
            blocking=blocking,
        )

    def load_checkpoint(
        self, path: str | os.PathLike[str], state: dict[str, Any] | None = None, *, strict: bool = True
    ) -> dict[str, Any]:
        """Read a checkpoint that any strategy wrote at any world size; every rank calls this.

        Args:
            path: The folder.
            state: What to restore: modules, optimizers and stateful objects are filled in place, plain
                values are replaced in the dict. None restores nothing and returns all values.
            strict: Whether anything that differs or lacks is an error, before anything was touched.

        Returns:
            What was in the checkpoint and not asked for: values, and None for each module and optimizer.

        Raises:
            CheckpointNotFound: If the path holds no committed checkpoint.
            CheckpointMismatch: Listing every difference.
            CheckpointCorrupted: Naming the damaged tensors.
        """
        self.barrier(f"load_checkpoint of {path}")
        contents = self._contents(state or {})
        tensors = contents.modules or contents.optimizers
        asked = self.engine_state(contents.modules, contents.optimizers) if tensors else None
        # Checked with all else: a value found lacking after the tensors were filled would come too late.
        values = contents.names_of_values - {PRECISION_KEY}
        loaded = self.checkpoint_io.load(path, asked, coordinator=self.collectives, strict=strict, values=values)
        if loaded.differences:
            warnings.warn(f"left as they were: {'; '.join(loaded.differences)}.", stacklevel=2)
        left = contents.restore(loaded.values, into=state)
        return {**dict.fromkeys(loaded.remainder), **left}

    def module_state_dict(self, module: torch.nn.Module, full: bool = True) -> dict[str, torch.Tensor]:
        """Give a module's parameters and persistent buffers under the user's own names.

        Args:
            module: What setup returned.
            full: Whole tensors in host memory on rank 0 and nothing on other ranks; False gives what
                is on this rank.

        Returns:
            Tensors by name.
        """
        known = self._registry.of(module)
        state = self.engine_state({"model": known.module}, {})
        if not full:
            return {shard.key.removeprefix("model."): shard.view for shard in state.shards()}
        whole = full_tensors(state, self.collectives)
        return {key.removeprefix("model."): tensor for key, tensor in whole if self.is_global_zero}

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer, full: bool = True) -> dict[str, Any]:
        """Give an optimizer's state by parameter name, in the layout of torch's own optimizer state dicts.

        Args:
            optimizer: One that was set up.
            full: Whole tensors in host memory on rank 0 and an empty dict on other ranks; False gives
                what is on this rank.

        Returns:
            ``{"state": {name: {slot: value}}, "param_groups": [{"params": [name, ...], ...}]}``.
        """
        known = self._registry.owner(optimizer)
        state = self.engine_state({"model": known.module}, {"optimizer": optimizer})
        record = state.optimizers()["optimizer"]
        slots: dict[str, dict[str, Any]] = {}
        pairs = (
            full_tensors(state, self.collectives, prefix="optim.")
            if full
            else ((shard.key, shard.view) for shard in state.shards())
        )
        for key, tensor in pairs:
            if key.startswith("optim."):
                name, _, slot = key.removeprefix("optim.").rpartition(".")
                slots.setdefault(name, {})[slot] = tensor
        if full and not self.is_global_zero:
            return {}
        for name, scalars in record.scalars.items():
            slots.setdefault(name, {}).update(scalars)
        return {"state": slots, "param_groups": [dict(group) for group in record.groups]}

    def full_parameters(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream a module's whole parameters and buffers in host memory, one at a time, on every rank.

        Args:
            module: What setup returned.

        Yields:
            The user's name and the whole tensor; only the current one takes memory.
        """
        state = self.engine_state({"model": self._registry.of(module).module}, {})
        for key, tensor in full_tensors(state, self.collectives):
            yield key.removeprefix("model."), tensor

    def _contents(self, state: Mapping[str, Any]) -> Contents:
        unwrapped = {
            key: self.unwrap(value) if isinstance(value, torch.nn.Module) else value for key, value in state.items()
        }
        if self.precision.state_dict():
            unwrapped[PRECISION_KEY] = self.precision
        return Contents(unwrapped)
