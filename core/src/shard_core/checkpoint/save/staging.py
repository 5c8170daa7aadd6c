"""Staging for async saves: host copies of training state as it was at one moment, written while training goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shard_core._versions import version_of
from shard_core.checkpoint.format.json_fields import Fields
from shard_core.checkpoint.format.values import decode
from shard_core.checkpoint.save.rank_files import value_shards
from shard_core.checkpoint.state.optimizer_record import OptimizerRecord
from shard_core.checkpoint.state.training_state import Slot, TrainingState
from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    from shard_core.checkpoint.state.shard import TensorShard


class Snapshot(TrainingState):
    """A copy of what one rank saves of a state and of the user's values.

    Order of calls: ``take``, which copies what may change at any time; ``stage``, by any thread, before the next step
    of an optimizer, which copies parameters and optimizer state and finds out whether anybody has changed them
    meanwhile; then what a save calls. All descriptions are made at once. Before ``take``, the shards are the
    live ones.

    Args:
        state: What is saved.
        values: The rest, by the user's names.
        rank: This rank; rank 0 saves the values.

    Raises:
        CheckpointError: If there is something that no checkpoint can hold.
    """

    def __init__(self, state: TrainingState, values: Mapping[str, Any], *, rank: int) -> None:
        self._copies = Staging()
        encoded, tensors = value_shards(values, write=rank == 0)
        views = {shard.key: self._staged(shard).view for shard in tensors}
        self.values: dict[str, Any] = {name: decode(value, views.__getitem__) for name, value in encoded.items()}
        self._modules = tuple(state.modules)
        self._aliases = state.aliases()
        self._optimizers = {
            name: OptimizerRecord.from_json(Fields(record.to_json(name), f"optimizer {name!r}"))
            for name, record in state.optimizers().items()
        }
        self._holds_copies = state.holds_copies
        self._shards = state.shards()
        self._waiting: dict[int, tuple[int | None, int | None]] = {}

    @property
    def bytes(self) -> int:
        """How much room the copies take, or would."""
        return 0 if self._holds_copies else sum(shard.view.nbytes for shard in self._shards if shard.write)

    def take(self) -> None:
        """Copy what may change at any time, and note how the rest is."""
        self._waiting = {place: _versions(shard) for place, shard in enumerate(self._shards) if _can_wait(shard)}
        self._shards = [
            shard if place in self._waiting else self._staged(shard, is_copy=self._holds_copies)
            for place, shard in enumerate(self._shards)
        ]

    def stage(self) -> None:
        """Copy what was left, and release the live tensors.

        Raises:
            CheckpointError: Naming a tensor that was changed before it was copied, or while it was.
        """
        live = {place: self._shards[place] for place in self._waiting}
        for place, shard in live.items():
            self._shards[place] = _holding(shard, self._copies.later(shard.view))
        self._copies.finish()
        changed = [shard.label for place, shard in live.items() if _versions(shard) != self._waiting[place]]
        if changed:
            raise CheckpointError(
                f"{_named(changed)} changed before the save had copied it; wait for the handle's staged before you "
                "change weights or optimizer state outside optimizer_step."
            )

    @property
    def modules(self) -> Sequence[str]:
        """The user's names for the modules."""
        return self._modules

    def shards(self) -> list[TensorShard]:
        """List the boxes on this rank; those of others' have no values."""
        return list(self._shards)

    def aliases(self) -> dict[str, str]:
        """Return the further keys of tied tensors."""
        return dict(self._aliases)

    def optimizers(self) -> dict[str, OptimizerRecord]:
        """Describe the optimizers as they were."""
        return dict(self._optimizers)

    def prepare_load(self, slots: Sequence[Slot]) -> None:
        """Refuse to be loaded into."""
        del slots
        raise CheckpointError("a snapshot can only be saved; load into the live state.")

    def finish_load(self, optimizers: Sequence[OptimizerRecord]) -> None:
        """Refuse to be loaded into."""
        del optimizers
        raise CheckpointError("a snapshot can only be saved; load into the live state.")

    def _staged(self, shard: TensorShard, *, is_copy: bool = False) -> TensorShard:
        """Return a copy of what this rank writes; of the rest, dtype and shape alone."""
        if not shard.write:
            return _holding(shard, torch.empty_like(shard.view, device="meta"))
        return shard if is_copy else _holding(shard, self._copies.now(shard.view))


def _can_wait(shard: TensorShard) -> bool:
    return shard.write and shard.stepped is not None and None not in _versions(shard)


def _versions(shard: TensorShard) -> tuple[int | None, int | None]:
    """Count changes of the user's tensor and of its memory: a distributed tensor's local tensor counts for itself."""
    return None if shard.stepped is None else version_of(shard.stepped), version_of(shard.view)


def _holding(shard: TensorShard, view: torch.Tensor) -> TensorShard:
    return dataclasses.replace(shard, view=view, stepped=None)


def _named(changed: Sequence[str]) -> str:
    return f"{changed[0]!r} was" if len(changed) == 1 else f"{changed[0]!r} and {len(changed) - 1} more were"


class Staging:
    """Copies what may change soon at once, and the rest when training has gone on.

    On CUDA all copies go to pinned memory: those made at once in the order of training's own work, the others on a
    stream of their own, from the moment this was created.

    Example:
        >>> weight = torch.ones(2)
        >>> copies = Staging()
        >>> first = copies.now(weight)
        >>> copies.finish()
        >>> weight.zero_(), first
        (tensor([0., 0.]), tensor([1., 1.]))
    """

    def __init__(self) -> None:
        cuda = torch.cuda.is_initialized()
        self._begun = torch.cuda.current_stream().record_event() if cuda else None
        self._stream: torch.cuda.Stream | None = None
        self._last: torch.cuda.Event | None = None

    def now(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor as it is; the copy may be read after ``finish``."""
        copy = _copied(tensor)
        if tensor.is_cuda:
            self._last = torch.cuda.current_stream(tensor.device).record_event()
        return copy

    def later(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor that is still as it was when this was made; the copy may be read after ``finish``."""
        if not tensor.is_cuda:
            return _copied(tensor)
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
            if self._begun is not None:
                self._stream.wait_event(self._begun)
        with torch.cuda.stream(self._stream):
            return _copied(tensor)

    def finish(self) -> None:
        """Wait for all copies."""
        if self._last is not None:
            self._last.synchronize()
        if self._stream is not None:
            self._stream.synchronize()


@torch.no_grad()
def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=tensor.is_cuda)
