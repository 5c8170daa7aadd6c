"""What users iterate: each rank's batches, on its device, with a position that can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from shard_core.data.indexed import IndexedFeed
from shard_core.data.rounds import DrawnRounds
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
    unseen sample; ``set_epoch(loader.epoch + 1)`` begins afresh instead. All ranks iterate at the same time.

    An ``IterableDataset`` is shared by whole batches: every rank reads all of it and is handed batch n if it is data
    rank n modulo their number. A last round that has no batch for every rank is left out on all, and logged once. One
    that gives each rank its own share passes through as it is. Which of the two it is ``shard_stream`` sets; else
    the ranks compare their first batch. If it is alike everywhere the stream is shared. If it differs it must bear
    the mark of a library that has split it, or come from a loader with a ``state_dict``; anything else is an error.
    The length is known from then on. A stream that was left early begins afresh, or where its ``state_dict`` stood.

    The position of a stream can be saved if it has a ``state_dict`` and no worker processes, or the loader has one.
    A shared one resumes at every world size, one that gives each rank its share at its own.

    Args:
        loader: The user's loader over all data, alike on every rank.
        rank: This rank's place among those that see different data.
        world_size: How many those are.
        coordinator: Of all ranks; construction and iteration exchange a message.
        transfer: Moves a batch to this rank's device.
        split_batches: Whether the loader's batch size is the global one, of all ranks.
        shard_stream: For an ``IterableDataset``: whether to share its batches among ranks, since every rank's loader
            gives all of them in the same order; False if each rank's gives that rank's own share.
        rounds: Where to record what was drawn last.

    Raises:
        InvalidOption: If this is no ``DataLoader``, ranks were given different ones, its sampler splits the data
            for other ranks, its batches are to be split and do not divide, or ``shard_stream`` is given for a dataset
            with indices. Iterating raises it if nothing says whether a stream is to be shared, or if one that is
            shared has not as many batches on every rank.
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
        shard_stream: bool | None = None,
        rounds: DrawnRounds | None = None,
    ) -> None:
        if not isinstance(loader, DataLoader):
            raise InvalidOption(
                f"process_dataloader takes a torch DataLoader, not {type(loader).__name__}; other iterables can "
                "be used as they are, with batch_to_device."
            )
        if not (shard_stream is None or isinstance(shard_stream, bool)):
            raise InvalidOption(f"shard_stream is {shard_stream!r}; give True, False, or None to find out.")
        self._transfer = transfer
        self._rounds = rounds or DrawnRounds()
        self._feed: IndexedFeed | StreamFeed
        ranks: dict[str, Any] = {"rank": rank, "world_size": world_size, "coordinator": coordinator}
        if isinstance(loader.dataset, IterableDataset):
            self._feed = StreamFeed(loader, **ranks, split_batches=split_batches, shard_stream=shard_stream)
        elif shard_stream is None:
            self._feed = IndexedFeed(loader, **ranks, split_batches=split_batches)
        else:
            raise InvalidOption(
                f"shard_stream is for an IterableDataset, and {type(loader.dataset).__name__} has indices: its samples "
                "are shared out always; leave shard_stream out."
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
        """Set the epoch that the next ``iter`` yields.

        In the present epoch the position is kept, so a script that resumes in the middle may call this as
        it does otherwise; of an epoch that was loaded as finished, nothing is given again.

        Args:
            epoch: From 0.
        """
        self._feed.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches, on its device."""
        iteration = object()
        try:
            for drawn, batch in self._feed:
                self._rounds.draw(iteration, self, drawn)
                yield self._transfer(batch)
        finally:
            self._rounds.end(iteration)

    def __len__(self) -> int:
        """Count this rank's batches in a whole epoch; every rank has as many.

        Raises:
            TypeError: If a stream has no length, or its first batch is yet to show whether it is shared.
        """
        return len(self._feed)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of what was handed out so far; every rank calls this.

        Returns:
            JSON values, the same on every rank and good for any world size; of a stream that gives each rank its own
            share, for as many ranks as now.

        Raises:
            CheckpointError: If the position is unknown.
        """
        return self._feed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position at which ``state_dict`` was called: the next is the first unseen sample.

        Args:
            state: What it returned, at this or another world size.

        Raises:
            CheckpointMismatch: If the data, the kind of order or the seed given to the loader differ; lists how.
        """
        self._feed.load_state_dict(state)
