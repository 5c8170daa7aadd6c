"""Random numbers: the same initial weights on every rank, different dropout masks."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from shard_core.coordinator import Coordinator


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, of the CPU and of every accelerator.

    Args:
        seed: From 0 to 2**32 - 1.

    Example:
        >>> seed_everything(7); first = torch.rand(())
        >>> seed_everything(7); bool(torch.rand(()) == first)
        True
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def derived_seed(seed: int, *parts: int) -> int:
    """Derive a seed that differs for every combination of parts, alike on every machine.

    Args:
        seed: Where it all starts from.
        parts: For example a data-parallel rank.

    Returns:
        A seed of 63 bits.

    Example:
        >>> derived_seed(7, 1) == derived_seed(7, 1), derived_seed(7, 1) == derived_seed(7, 2)
        (True, False)
    """
    text = ",".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def shared_generator(coordinator: Coordinator) -> Iterator[None]:
    """Let all ranks draw rank 0's random numbers inside, and go on with their own after.

    Args:
        coordinator: What ranks agree through.
    """
    own = torch.get_rng_state()
    shared = coordinator.broadcast_object(own)
    if coordinator.rank == 0 or torch.equal(own, shared):
        yield
        return
    torch.set_rng_state(shared)
    try:
        yield
    finally:
        torch.set_rng_state(own)


def part_ways(data_rank: int) -> None:
    """Give this data-parallel rank a stream of random numbers of its own, for dropout and the like.

    The first rank's stream goes on as in a single process.

    Args:
        data_rank: This rank's place among the data-parallel ranks.
    """
    if data_rank > 0:
        torch.manual_seed(derived_seed(torch.initial_seed(), data_rank))
