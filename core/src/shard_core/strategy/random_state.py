"""Where the generators of all ranks stand, as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shard_core.randomness import derived_seed, generator_states, seed_everything, set_generator_states

if TYPE_CHECKING:
    from shard_core.coordinator import Coordinator

_NUMPY_SEEDS = 2**32


def gather_random_state(
    coordinator: Coordinator, device: torch.device, data_rank: int, engine: torch.Tensor | None
) -> dict[str, Any]:
    """Take down where the generators of all ranks stand; every rank calls this.

    Args:
        coordinator: What ranks talk through.
        device: This rank's.
        data_rank: This rank's place among those that see different data.
        engine: Where the engine's own generator stands on this rank, if it has one.

    Returns:
        For each generator one row per rank, and the ranks' data ranks.
    """
    own = generator_states(device) | ({"engine": engine} if engine is not None else {})
    ranks = coordinator.gather_objects((data_rank, own))
    return {
        "data_ranks": [data for data, _ in ranks],
        "generators": {name: torch.stack([states[name] for _, states in ranks]) for name in own},
    }


def take_up(
    saved: Mapping[str, Any], coordinator: Coordinator, device: torch.device, data_rank: int
) -> tuple[int, torch.Tensor | None]:
    """Put this rank's generators where a checkpoint's stood; every rank calls this.

    At the same number of ranks, with the same data ranks, each goes on bit for bit. Otherwise each is seeded with a
    number derived from where rank 0's stood and its data rank, which is as repeatable.

    Args:
        saved: What ``gather_random_state`` returned.
        coordinator: What ranks talk through.
        device: This rank's.
        data_rank: This rank's place among those that see different data.

    Returns:
        The seed for generators of the engine's own, and where they stood if they can go on from there.
    """
    generators = saved["generators"]
    if coordinator.gather_objects(data_rank) == saved["data_ranks"]:
        # Copied, since torch reads a generator's state from where its storage begins.
        mine = {name: rows[coordinator.rank].clone() for name, rows in generators.items()}
        set_generator_states(mine, device)
        return torch.initial_seed(), mine.get("engine")
    whole = bytes(generators["torch"][0].tolist())
    seed = derived_seed(0, *whole, data_rank)
    seed_everything(seed % _NUMPY_SEEDS)
    torch.manual_seed(seed)
    return seed, None
