"""Random numbers of worker processes: seeded batch by batch, so that a resumed run goes on with the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from shard_core.randomness import seed_everything

_LARGEST = 2**32
"""NumPy takes smaller seeds alone."""


class Sent:
    """What a sampler gives to a worker process, whose generators are seeded as it arrives there.

    Args:
        item: What the data set is asked for: the indices of a batch, or one.
        seed: For what is drawn while they are read.
    """

    def __init__(self, item: Any, seed: int) -> None:
        self._item, self._seed = item, seed % _LARGEST

    def __reduce__(self) -> tuple[Callable[[Any, int], Any], tuple[Any, int]]:
        """Arrive as the item itself: workers read the batches that they are sent one by one."""
        return _arrived, (self._item, self._seed)


def _arrived(item: Any, seed: int) -> Any:
    if get_worker_info() is not None:
        seed_everything(seed)
    return item
