"""Which settings may train a model faster, for ``shard tune`` to measure."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shard_core.backend import find_units, unit_sizes

if TYPE_CHECKING:
    from torch import nn

    from shard_tp.config import TPConfig


def worth_trying(
    config: TPConfig, module: nn.Module, world_size: int
) -> Generator[Sequence[Mapping[str, Any]], Mapping[str, Any], None]:
    """Propose sizes of tensor-parallel groups, then how the rest is sharded over what they leave.

    Args:
        config: What the user has chosen.
        module: The user's, not set up.
        world_size: On how many ranks of one host it will be trained.

    Yields:
        Settings; the best so far is sent back.
    """
    own: int = _group(config, world_size)
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0 and size != own]
    best = yield [{"tensor_parallel_size": size} for size in sizes if config.data_parallel_size == "auto"]
    if best.get("tensor_parallel_size", own) == world_size:
        return  # nothing is sharded
    layouts = []
    for size in unit_sizes(module, config.unit_bytes):
        layouts.append({**best, "unit_bytes": size})
        if config.reshard_after_forward is None and find_units(module, size):
            layouts.append({**best, "unit_bytes": size, "reshard_after_forward": False})
    yield layouts


def _group(config: TPConfig, world_size: int) -> int:
    """Return how many ranks share a layer on one host."""
    if config.tensor_parallel_size != "auto":
        return config.tensor_parallel_size
    return world_size if config.data_parallel_size == "auto" else world_size // config.data_parallel_size
