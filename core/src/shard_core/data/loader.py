"""What users iterate: each rank's batches, on its device, with a position that can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from shard_core.data.indexed import IndexedFeed
from shard_core.data.stream import StreamFeed
from shard_core.errors import InvalidOption

if TYPE_CHECKING:
    from shard_core.collectives.interface import Collectives


class ShardedLoader:
    """This rank's share of a data loader.

    Over a dataset with indices, every global batch holds the same samples at every world size: a global batch is
    the next so many samples of an order that only the seed and the epoch decide. The seed is that of the loader's
    generator or ``DistributedSampler``, or else the one torch was seeded with when this was made; that one is saved
    with the position and taken up again. An incomplete last batch is left out with ``drop_last``; otherwise it is
    filled up from the start of the epoch until every rank gets as many samples. A sampler of the user's own is asked
    on rank 0; batches of an own batch sampler are dealt out whole, in turn.

    Each ``iter`` is the next epoch. One that was left early, or saved and loaded, goes on with the next
    unseen sample; ``set_epoch(loader.epoch + 1)`` begins afresh instead. All ranks iterate together.

    An ``IterableDataset`` passes through as it is: it must give each rank its own share, and its position can
    be saved only if it, or the loader, has a ``state_dict``.

    Args:
        loader: The user's loader over all data, alike on every rank.
        rank: This rank's place among those that see different data.
        world_size: How many those are.
        coordinator: What all ranks agree through; building and iterating exchange a message.
        transfer: Brings a batch to this rank's device.
        split_batches: Whether the loader's batch size is that of all ranks together, not of one.

    Raises:
        InvalidOption: If this is no ``DataLoader``, ranks were given different ones, its sampler splits the data
            for other ranks, or its batches are to be split and do not divide.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rank: int,
        world_size: int,
        coordinator: Collectives,
        transfer: Callable[[Any], Any],
        split_batches: bool = False,
    ) -> None:
        if not isinstance(loader, DataLoader):
            raise InvalidOption(
                f"process_dataloader takes a torch DataLoader, not {type(loader).__name__}; other iterables can "
                "be used as they are, with batch_to_device."
            )
        self._transfer = transfer
        self._feed: IndexedFeed | StreamFeed
        if isinstance(loader.dataset, IterableDataset):
            self._feed = StreamFeed(loader, coordinator=coordinator, split_batches=split_batches)
        else:
            self._feed = IndexedFeed(
                loader, rank=rank, world_size=world_size, coordinator=coordinator, split_batches=split_batches
            )

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self._feed.loader.dataset

    @property
    def epoch(self) -> int:
        """Which epoch it is in, from 0."""
        return self._feed.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch the next ``iter`` gives.

        In the present epoch the position is kept, so a script that resumes in the middle may call this as
        it does otherwise; of an epoch that was loaded as finished, nothing is given again.

        Args:
            epoch: From 0.
        """
        self._feed.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Give this rank's batches, on its device."""
        for batch in self._feed:
            yield self._transfer(batch)

    def __len__(self) -> int:
        """Count this rank's batches in a whole epoch; every rank has as many."""
        return len(self._feed)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of what was handed out so far; every rank calls this.

        Returns:
            JSON values, the same on every rank and good for any world size.

        Raises:
            CheckpointError: If the position is unknown.
        """
        return self._feed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was called, at the next unseen sample.

        Args:
            state: What it returned, at this or another world size.

        Raises:
            CheckpointMismatch: If the data, the kind of order or the seed given to the loader differ; lists how.
        """
        self._feed.load_state_dict(state)
