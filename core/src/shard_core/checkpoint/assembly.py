"""Whole tensors put together from the parts that ranks hold, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shard_core.checkpoint.state import TrainingState
    from shard_core.coordinator import Coordinator


def full_tensors(
    state: TrainingState, coordinator: Coordinator, prefix: str = ""
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream the whole tensors behind a state's shards; every rank iterates to the end.

    Args:
        state: Which parts live on this rank.
        coordinator: What ranks exchange parts through.
        prefix: Only keys that begin with this.

    Yields:
        The key and the whole tensor in host memory, on every rank, a tied tensor under each of its keys;
        memory is that of the largest tensor.
    """
    parts: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = {}
    layouts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for shard in state.shards():
        if shard.key.startswith(prefix):
            layouts[shard.key] = shard.shape, shard.view.dtype
            if shard.write and shard.view.numel():
                parts.setdefault(shard.key, []).append((shard.offsets, shard.view))
    known: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for theirs in coordinator.gather_objects(layouts):
        known.update({key: layout for key, layout in theirs.items() if key not in known})
    tied: dict[str, list[str]] = {}
    for name, stored in state.aliases().items():
        tied.setdefault(stored, []).append(name)
    for key, (shape, dtype) in known.items():
        mine = [(offsets, view.detach().cpu()) for offsets, view in parts.get(key, [])]
        whole = torch.empty(shape, dtype=dtype)
        for offsets, view in (part for theirs in coordinator.gather_objects(mine) for part in theirs):
            box = tuple(slice(start, start + size) for start, size in zip(offsets, view.shape, strict=True))
            whole[box] = view
        for name in (key, *tied.get(key, ())):
            yield name, whole
