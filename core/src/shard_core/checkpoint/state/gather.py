"""Gathering whole tensors from the shards that ranks hold, a few at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from shard_core.checkpoint.storage.batches import batched
from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    from shard_core.checkpoint.state.training_state import TrainingState
    from shard_core.coordinator import Coordinator

#: How much is on its way between ranks at once: many models have hundreds of tensors of a few bytes.
_BYTES_AT_ONCE = 1 << 24


def full_tensors(
    state: TrainingState, coordinator: Coordinator, prefix: str = ""
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream the whole tensors of a state's shards; every rank iterates to the end.

    Args:
        state: Which shards live on this rank.
        coordinator: How ranks talk.
        prefix: Only keys that begin with this.

    Yields:
        The key and the whole tensor in host memory, on every rank, a tied tensor under each of its keys;
        memory is that of the largest tensor, or of some small ones.
    """
    local: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = {}
    layouts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for shard in state.shards():
        if shard.key.startswith(prefix):
            layouts[shard.key] = tuple(shard.shape), shard.view.dtype
            if shard.write and shard.view.numel():
                local.setdefault(shard.key, []).append((tuple(shard.offsets), shard.view))
    known: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for theirs in coordinator.gather_objects(layouts):
        known.update({key: layout for key, layout in theirs.items() if key not in known})
    tied: dict[str, list[str]] = {}
    for name, stored in state.aliases().items():
        tied.setdefault(stored, []).append(name)
    lengths = {key: math.prod(shape) * dtype.itemsize for key, (shape, dtype) in known.items()}
    for keys in batched(known, lengths.__getitem__, _BYTES_AT_ONCE):
        # Copied: a view that is sent takes with it all it is a view of.
        mine = {key: [(at, view.detach().to("cpu", copy=True)) for at, view in local.get(key, ())] for key in keys}
        gathered = coordinator.gather_objects(mine)
        for key in keys:
            whole = _joined(key, *known[key], [piece for theirs in gathered for piece in theirs[key]])
            for name in (key, *tied.get(key, ())):
                yield name, whole


def _joined(
    key: str, shape: tuple[int, ...], dtype: torch.dtype, pieces: list[tuple[tuple[int, ...], torch.Tensor]]
) -> torch.Tensor:
    whole = torch.empty(shape, dtype=dtype)
    given = sum(piece.numel() for _, piece in pieces)
    if given != whole.numel():
        raise CheckpointError(
            f"ranks hold {given} of the {whole.numel()} elements of {key!r}, each to be counted once; the strategy's "
            "engine_state() must give all of a tensor, each part of it on one rank to write."
        )
    for offsets, piece in pieces:
        whole[tuple(slice(start, start + size) for start, size in zip(offsets, piece.shape, strict=True))] = piece
    return whole
