"""Batches from a dataset that only streams: shared out by whole batches, unless it gives each rank its own share."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

from shard_core._versions import is_split_over_ranks
from shard_core.data.rounds import Round
from shard_core.data.sharing import check_same_data, reads_alike, shards_itself
from shard_core.errors import CheckpointError, CheckpointMismatch, InvalidOption

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch.utils.data import DataLoader

    from shard_core.collectives.interface import Collectives

log = logging.getLogger(__name__)


class StreamFeed:
    """Iterates a user's loader over an iterable dataset.

    Args:
        loader: The user's loader.
        rank: This rank's place among those that see different data.
        world_size: How many those are.
        coordinator: Of all ranks.
        split_batches: Refused: a stream is shared by whole batches.
        shard_stream: Whether every rank reads the whole stream and is handed its share of the batches; None finds out
            with the first batch.

    Raises:
        InvalidOption: If batches are to be split, or ranks were given different data.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rank: int,
        world_size: int,
        coordinator: Collectives,
        split_batches: bool,
        shard_stream: bool | None,
    ) -> None:
        if split_batches:
            raise InvalidOption(
                "split_batches needs a dataset with indices; an IterableDataset is shared by whole batches, so take "
                "the batch size of one rank."
            )
        self.loader = loader
        self.epoch = 0
        self._rank = rank
        self._world_size = world_size
        self._coordinator = coordinator
        if shard_stream and is_split_over_ranks(loader.dataset):
            raise InvalidOption(
                f"shard_stream=True would share {type(loader.dataset).__name__} a second time: its library has split "
                "it over ranks already; leave shard_stream out, or give every rank the set as it was before the split."
            )
        self._marked = shards_itself(loader)
        facts = {"dataset": "an IterableDataset", "shard_stream": shard_stream, "a mark of sharding": self._marked}
        check_same_data(facts, None, coordinator)
        self._finds_out = shard_stream is None and coordinator.world_size > 1
        self._shared = not self._marked if shard_stream is None and not self._finds_out else shard_stream
        self._loaded: Mapping[str, Any] = {}
        self._reported = False

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, of the loader and its dataset too where they have one."""
        self.epoch = epoch
        for listener in (self.loader, self.loader.dataset):
            if hasattr(listener, "set_epoch"):
                listener.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Round, Any]]:
        """Yield each round, and this rank's batch of it."""
        drawn = Round(items=self._world_size, in_turn=False)
        batches: Iterator[Any] = iter(self.loader)
        if self._finds_out and self._shared is not False:  # epochs may be shuffled alike, or each rank's in its own way
            first = list(itertools.islice(batches, 1))
            batches = itertools.chain(first, batches)
            found = reads_alike(first, marked=self._marked, replicas=self._world_size, coordinator=self._coordinator)
            self._shared = self._shared if found is None else found
            self._check_kind(self._loaded)
        self._loaded = {}
        for batch in self._dealt(batches) if self._shared else batches:
            yield drawn, batch
        self.epoch += 1

    def __len__(self) -> int:
        """Return the loader's length; only by a TypeError do ``list`` and progress bars know that there is none."""
        if self._shared is None:
            raise TypeError(
                "the length is known when the first batch has shown whether ranks share this IterableDataset; pass "
                "shard_stream=True or False to process_dataloader to have it earlier."
            )
        return len(self.loader) // self._world_size if self._shared else len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return rank 0's state of a shared stream, or else every rank's; every rank calls this."""
        if self._shared is None and self._loaded:
            return dict(self._loaded)
        state = self._owner().state_dict()
        if self._shared:
            state = self._coordinator.broadcast_any(state)
            return {"epoch": self.epoch, "order": "stream", "shared": True, "state": state}
        ranks = [self._coordinator.broadcast_any(state, src) for src in range(self._coordinator.world_size)]
        return {"epoch": self.epoch, "order": "stream", "ranks": ranks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a shared stream on every rank, or each rank's own, if there are as many as then."""
        if state.get("order") != "stream":
            raise CheckpointMismatch(
                f"the data cannot go on where it was saved: the order was {state.get('order')!r} and is 'stream'. "
                "Resume with the data of the run that saved it, or leave the loader out of the state."
            )
        mine = state["state"] if state.get("shared") else self._share_of(state["ranks"])
        self._check_kind(state)
        self._loaded, self.epoch = state, state["epoch"]
        self._owner().load_state_dict(mine)

    def _dealt(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield one batch of each round, once the whole round is there: no rank may have a batch more."""
        count = 0
        mine = None
        for number, batch in enumerate(batches):
            count = number + 1
            if number % self._world_size == self._rank:
                mine = batch
            if count % self._world_size == 0:
                yield mine
        self._check_ends_alike(count)
        left = count % self._world_size
        if left and self._coordinator.rank == 0 and not self._reported:
            self._reported = True
            log.warning(
                "the last %d of the %d batches of epoch %d of an IterableDataset were left out: %d data-parallel ranks "
                "take equally many; this is logged once.",
                left,
                count,
                self.epoch,
                self._world_size,
            )

    def _check_ends_alike(self, count: int) -> None:
        """Check that all ranks saw the same stream to its end."""
        if self._coordinator.world_size == 1:
            return
        # Names in time who goes on alone with a longer stream, instead of mixing with what that rank reduces.
        self._coordinator.barrier(f"the end of epoch {self.epoch} of an IterableDataset that ranks share")
        counts = self._coordinator.gather_objects(count)
        if len(set(counts)) > 1:
            raise InvalidOption(
                f"ranks share an IterableDataset, but it gave them {counts} batches in epoch {self.epoch}; let it give "
                "every rank all batches in the same order, or each rank's own share and pass shard_stream=False to "
                "process_dataloader."
            )

    def _share_of(self, ranks: list[Any]) -> Any:
        if len(ranks) != self._coordinator.world_size:
            raise CheckpointMismatch(
                f"the position of an IterableDataset was saved by {len(ranks)} ranks and cannot be divided among "
                f"{self._coordinator.world_size}; resume with {len(ranks)} ranks, use a dataset with indices, or leave "
                "the loader out of the state."
            )
        if self._shared and any(each != ranks[0] for each in ranks):
            raise CheckpointMismatch(
                "the position of an IterableDataset was saved by ranks at different places of it, and these cannot "
                "share it now; resume with shard_stream=False, or leave the loader out of the state."
            )
        return ranks[self._coordinator.rank]

    def _check_kind(self, state: Mapping[str, Any]) -> None:
        """Refuse to go on in a rank's own share at the position of a stream that all ranks shared."""
        if self._shared is False and state.get("shared"):
            raise CheckpointMismatch(
                "the position was saved in an IterableDataset that ranks shared, and now it gives each rank its own "
                "share; resume with the data of the run that saved it, or leave the loader out of the state."
            )

    def _owner(self) -> Any:
        """Find who knows the position: a dataset in worker processes runs ahead of what was handed out."""
        if hasattr(self.loader, "state_dict"):
            return self.loader
        if hasattr(self.loader.dataset, "state_dict") and self.loader.num_workers == 0:
            return self.loader.dataset
        raise CheckpointError(
            f"the position of {type(self.loader.dataset).__name__} is unknown, and resuming without it would repeat or "
            "skip samples; use a dataset with indices, a loader with state_dict(), a dataset with state_dict() and "
            "num_workers=0, or leave the loader out of the state."
        )
