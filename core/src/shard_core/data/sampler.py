"""One rank's share of every global batch, from any position on."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

from shard_core.data.rounds import Round
from shard_core.data.worker_seeds import Sent
from shard_core.randomness import derived_seed

if TYPE_CHECKING:
    from shard_core.data.order import Order


class ResumableSampler(Sampler[Any]):
    """Deals the items of an epoch out to ranks.

    A global batch is the next ``global_batch`` items of the order, whatever the world size; its first item
    goes to rank 0, the second to rank 1, and so on in turn, as torch's ``DistributedSampler`` does it.
    A last batch that cannot be dealt out evenly is filled up with items from the start of the epoch.

    Iterating gives one epoch from ``position`` on and does not move it: a data loader asks for batches
    ahead of what it hands out, so whoever hands them out keeps count.

    Args:
        order: The items of every epoch.
        rank: Whose share.
        world_size: How many shares.
        global_batch: How many items one step takes, over all ranks.
        drop_last: Whether an incomplete last batch is left out.
        single: Whether a rank's share of a batch is one item, handed out as it is and not in a list.
        in_workers: Whether worker processes read the items.

    Attributes:
        seed: What shuffled orders are drawn from.
        epoch: Which epoch.
        position: How many of its items have been taken, over all ranks.
        digest: Of the order last listed, if the user's own sampler gave it.

    Example:
        >>> from shard_core.data.order import Order
        >>> order = Order(kind="sequential", seed=0, count=7, items=lambda seed, epoch: range(7))
        >>> [list(ResumableSampler(order, rank=r, world_size=2, global_batch=4)) for r in (0, 1)]
        [[[0, 2], [4, 6]], [[1, 3], [5, 0]]]
    """

    def __init__(
        self,
        order: Order,
        *,
        rank: int,
        world_size: int,
        global_batch: int,
        drop_last: bool = False,
        single: bool = False,
        in_workers: bool = False,
    ) -> None:
        self.order = order
        self.seed = order.seed
        self.epoch = order.first_epoch
        self.position = 0
        self._rank = rank
        self._world_size = world_size
        self._global_batch = global_batch
        # Cutting the end so that every rank gets as many asks for a whole item each, dropping for a whole batch.
        self._smallest = global_batch if drop_last else 1 if order.pad else world_size
        self._single, self._in_workers = single, in_workers
        self._listed: tuple[tuple[int, int], Sequence[Any] | torch.Tensor] | None = None
        self.digest: str | None = None

    def begin(self) -> None:
        """List the items of the epoch; every rank calls this before it iterates."""
        if self._listed is None or self._listed[0] != (self.seed, self.epoch):
            items = self.order.items(self.seed, self.epoch)
            self._listed = (self.seed, self.epoch), items
            own = isinstance(items, list)
            self.digest = hashlib.blake2b(repr(items).encode(), digest_size=8).hexdigest() if own else None

    def steps(self, start: int = 0) -> int:
        """Count the global batches of the epoch.

        Args:
            start: The position to count from.
        """
        whole, rest = divmod(max(self._count - start, 0), self._global_batch)
        return whole + (rest >= self._smallest)

    def round(self) -> Round:
        """Describe the global batch at the position."""
        items = min(self._count - self.position, self._global_batch)
        if not self.order.pad:
            items -= items % self._world_size
        if self._single:
            return Round(items=items, in_turn=False)
        return Round(items=items, in_turn=True, size=-(-items // self._world_size))

    def advance(self) -> None:
        """Advance the position: every rank has got its share of one more global batch."""
        self.position = min(self.position + self._global_batch, self._count)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's share of each remaining global batch."""
        self.begin()
        first = self.position  # it moves on while this runs
        for step in range(self.steps(first)):
            start = first + step * self._global_batch
            share = self._dealt(start)[self._rank :: self._world_size]
            item = share[0] if self._single else share
            yield Sent(item, derived_seed(self.seed, self.epoch, start, self._rank)) if self._in_workers else item

    def __len__(self) -> int:
        """Count the batches of a whole epoch."""
        return self.steps()

    @property
    def _count(self) -> int:
        if self._listed is None or self._listed[0] != (self.seed, self.epoch):
            return self.order.count
        return len(self._listed[1])

    def _dealt(self, start: int) -> list[Any]:
        """Return one global batch, made even."""
        window = self._items(start, start + self._global_batch)
        over = len(window) % self._world_size
        if not over:
            return window
        if not self.order.pad:
            return window[:-over]
        missing = self._world_size - over
        return window + list(itertools.islice(itertools.cycle(self._items(0, missing)), missing))

    def _items(self, start: int, stop: int) -> list[Any]:
        assert self._listed is not None
        window = self._listed[1][start:stop]
        return window.tolist() if isinstance(window, torch.Tensor) else list(window)
