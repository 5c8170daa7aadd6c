"""Batches from a dataset that only streams: it is the user's to split over ranks, and to say where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shard_core.errors import CheckpointError, CheckpointMismatch, InvalidOption

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.utils.data import DataLoader

    from shard_core.collectives.interface import Collectives


class StreamFeed:
    """Iterates a user's loader over an iterable dataset, as it is.

    Args:
        loader: The user's loader.
        coordinator: What all ranks agree through.
        split_batches: Refused: a stream cannot be split here.

    Raises:
        InvalidOption: If batches are to be split.
    """

    def __init__(self, loader: DataLoader[Any], *, coordinator: Collectives, split_batches: bool) -> None:
        if split_batches:
            raise InvalidOption(
                "split_batches needs a dataset with indices; an IterableDataset gives each rank its share itself."
            )
        self.loader = loader
        self.epoch = 0
        self._coordinator = coordinator

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader and its dataset, where they want to know."""
        self.epoch = epoch
        for listener in (self.loader, self.loader.dataset):
            if hasattr(listener, "set_epoch"):
                listener.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Give the loader's batches."""
        yield from self.loader
        self.epoch += 1

    def __len__(self) -> int:
        """Ask the loader."""
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Collect every rank's state of the loader or its dataset; every rank calls this."""
        state = self._owner().state_dict()
        ranks = [self._coordinator.broadcast_any(state, src) for src in range(self._coordinator.world_size)]
        return {"epoch": self.epoch, "order": "stream", "ranks": ranks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hand every rank's state back to it, if there are as many ranks as then."""
        ranks = state.get("ranks", [])
        if len(ranks) != self._coordinator.world_size:
            raise CheckpointMismatch(
                f"the position of an IterableDataset was saved by {len(ranks)} ranks and cannot be divided among "
                f"{self._coordinator.world_size}; resume with {len(ranks)} ranks, use a dataset with indices, or leave "
                "the loader out of the state."
            )
        self.epoch = state["epoch"]
        self._owner().load_state_dict(ranks[self._coordinator.rank])

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
