"""The states of all ranks' random number generators, as a checkpoint keeps them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shard_core.errors import CheckpointCorrupted
from shard_core.randomness import (
    check_generator_states,
    derived_seed,
    generator_states,
    seed_everything,
    set_generator_states,
)

if TYPE_CHECKING:
    from shard_core.strategy.engine import Engine

_NUMPY_SEEDS = 2**32

#: A rank's data rank, and the states of its generators by name.
RankState = tuple[int, dict[str, torch.Tensor]]


def own_random_state(device: torch.device, data_rank: int, engine: torch.Tensor | None) -> RankState:
    """Return the states of this rank's generators, which are part of what ``joint_random_state`` takes.

    Args:
        device: This rank's.
        data_rank: This rank's place among those that see different data.
        engine: The state of the engine's own generator on this rank, if it has one.
    """
    return data_rank, generator_states(device) | ({"engine": engine} if engine is not None else {})


def joint_random_state(ranks: Sequence[RankState]) -> dict[str, Any]:
    """Join the states of all ranks' generators.

    Args:
        ranks: What ``own_random_state`` returned on each rank, in rank order.

    Returns:
        For each generator one row per rank, and the ranks' data ranks.
    """
    return {
        "data_ranks": [data for data, _ in ranks],
        "generators": {name: torch.stack([states[name] for _, states in ranks]) for name in ranks[0][1]},
    }


@contextlib.contextmanager
def keep_generator(engine: Engine) -> Iterator[None]:
    """Restore the engine's generator afterwards: some move with whatever runs on the device, a save included.

    Args:
        engine: Whose generator is restored.
    """
    before = engine.engine_random_state()
    try:
        yield
    finally:
        if before is not None:
            engine.engine_set_random_state(before)


def check_random_state(saved: Any, rank: int, device: torch.device, engine: torch.Tensor | None) -> None:
    """Check that ``set_random_state`` accepts what a checkpoint holds.

    Args:
        saved: What ``joint_random_state`` may have returned.
        rank: This rank.
        device: This rank's.
        engine: The state of the engine's own generator on this rank, if it has one.

    Raises:
        CheckpointCorrupted: If it cannot.
    """
    try:
        rows = _rows(saved)
        row = rank if rank < len(saved["data_ranks"]) else 0
        mine = {name: each[row].clone() for name, each in rows.items()}
        check_generator_states(mine, device)
        other = mine.get("engine")
        if engine is not None and other is not None and (other.dtype, other.shape) != (engine.dtype, engine.shape):
            raise ValueError(f"'engine' is no {engine.dtype} tensor of shape {tuple(engine.shape)}")
    except ValueError as error:
        raise CheckpointCorrupted(
            f"the checkpoint does not say where the random number generators stood: {error}; nothing was changed, use "
            "another checkpoint."
        ) from error


def _rows(saved: Any) -> dict[str, torch.Tensor]:
    """Return each generator's states, a row per rank.

    Raises:
        ValueError: If there are no such rows.
    """
    fields = saved if isinstance(saved, dict) else {}
    data_ranks, generators = fields.get("data_ranks"), fields.get("generators")
    if not isinstance(data_ranks, list) or not data_ranks or not isinstance(generators, dict):
        raise ValueError("it lacks 'data_ranks' or 'generators'")
    for name, rows in generators.items():
        if not isinstance(rows, torch.Tensor) or not rows.dim() or len(rows) != len(data_ranks):
            raise ValueError(f"{name!r} has no row for each of {len(data_ranks)} ranks")
    return dict(generators)


def set_random_state(
    saved: Mapping[str, Any], rank: int, data_ranks: Sequence[int], device: torch.device
) -> tuple[int, torch.Tensor | None]:
    """Set this rank's generators to the states in a checkpoint.

    At the same number of ranks, with the same data ranks, each goes on bit for bit. Otherwise each is seeded with a
    number derived from rank 0's state and its data rank, which is as repeatable.

    Args:
        saved: What ``joint_random_state`` returned.
        rank: This rank.
        data_ranks: Every rank's place among those that see different data.
        device: This rank's.

    Returns:
        The seed for the engine's own generator, and its state if it can go on from there.
    """
    generators = saved["generators"]
    if data_ranks == saved["data_ranks"]:
        # Copied, since torch reads a generator's state from where its storage begins.
        mine = {name: rows[rank].clone() for name, rows in generators.items()}
        set_generator_states(mine, device)
        return torch.initial_seed(), mine.get("engine")
    whole = bytes(generators["torch"][0].tolist())
    seed = derived_seed(0, *whole, data_ranks[rank])
    seed_everything(seed % _NUMPY_SEEDS)
    torch.manual_seed(seed)
    return seed, None
