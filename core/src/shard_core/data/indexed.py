"""Batches from a dataset with indices: a sampler of ours shares them out, so the position is known exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from shard_core.data.order import order_of, seed_of
from shard_core.data.sampler import ResumableSampler
from shard_core.data.sharing import check_same_data
from shard_core.errors import CheckpointMismatch, InvalidOption
from shard_core.randomness import derived_seed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shard_core.collectives.interface import Collectives
    from shard_core.data.rounds import Round


class IndexedFeed:
    """Iterates a user's loader with a sampler of ours in place of the user's.

    Args:
        loader: The user's loader, over a map-style dataset.
        rank: This rank's place among those that see different data.
        world_size: How many those are.
        coordinator: Of all ranks.
        split_batches: Whether the loader's batch size is the global one, of all ranks.

    Raises:
        InvalidOption: If ranks were given different loaders, or a batch cannot be shared out.
    """

    def __init__(
        self, loader: DataLoader[Any], *, rank: int, world_size: int, coordinator: Collectives, split_batches: bool
    ) -> None:
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise InvalidOption(
                f"{type(loader).__name__} iterates in its own way, so its samples cannot be shared out; hand "
                "process_dataloader a torch DataLoader, or split the data yourself and skip process_dataloader."
            )
        self._length = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
        seed, chosen = _agreed_seed(loader, self._length, split_batches, coordinator)
        self._sampler = ResumableSampler(
            order_of(loader, seed=seed, chosen=chosen, rank=rank, world_size=world_size, coordinator=coordinator),
            rank=rank,
            world_size=world_size,
            global_batch=_global_batch(loader, world_size, split_batches),
            drop_last=loader.drop_last,
            single=loader.batch_size is None,
            in_workers=loader.num_workers > 0,
        )
        self._rank = rank
        self._generator = torch.Generator()
        self.loader = _rebuilt(loader, self._sampler, self._generator)
        self._expected_digest: str | None = None
        self._resumed = False
        self._stays = False

    @property
    def epoch(self) -> int:
        """Which epoch it is in, from 0."""
        return self._sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; staying in the present one keeps the position, unless it was read to its end."""
        if epoch == self._sampler.epoch and self._resumed:
            self._stays = True
        elif epoch != self._sampler.epoch or not self._sampler.steps(self._sampler.position):
            self._sampler.epoch, self._sampler.position = epoch, 0
            self._expected_digest, self._resumed = None, False

    def __iter__(self) -> Iterator[tuple[Round, Any]]:
        """Yield the rest of the epoch, or the next epoch if nothing is left of it: each round, and its batch."""
        sampler = self._sampler
        sampler.begin()
        self._check_digest()
        if not sampler.steps(sampler.position) and not self._stays:
            sampler.epoch, sampler.position = sampler.epoch + 1, 0
            sampler.begin()
        self._resumed = self._stays = False
        # Workers begin with a generator of the loader's own: drawing from the user's here would make a resumed run,
        # which begins in the middle, go on with other random numbers than an uninterrupted one.
        self._generator.manual_seed(derived_seed(sampler.seed, sampler.epoch, sampler.position, self._rank))
        for batch in self.loader:
            drawn = sampler.round()
            sampler.advance()
            yield drawn, batch

    def __len__(self) -> int:
        """Count the batches of a whole epoch."""
        return len(self._sampler)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values, the same on every rank."""
        return {
            "epoch": self._sampler.epoch,
            "position": self._sampler.position,
            "seed": self._sampler.seed,
            "order": self._sampler.order.kind,
            "length": self._length,
            "digest": self._expected_digest or self._sampler.digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position that was saved at this or another world size."""
        order = self._sampler.order
        differences = []
        if state.get("order") != order.kind:
            differences.append(f"the order was {state.get('order')!r} and is {order.kind!r}")
        if state.get("length") != self._length:
            differences.append(f"the dataset had {state.get('length')} samples and has {self._length}")
        if state.get("seed") != order.seed and order.chosen and order.kind == "shuffled":
            differences.append(f"the loader's seed was {state.get('seed')} and is {order.seed}")
        if differences:
            raise CheckpointMismatch(
                f"the data cannot go on where it was saved: {'; '.join(differences)}. Resume with the data, the "
                "sampler and the seed of the run that saved it, or leave the loader out of the state."
            )
        self._sampler.seed = state["seed"]
        self._sampler.epoch, self._sampler.position = state["epoch"], state["position"]
        self._expected_digest = state["digest"]
        self._resumed = True

    def _check_digest(self) -> None:
        expected, self._expected_digest = self._expected_digest, None
        if self._sampler.position and expected not in (None, self._sampler.digest):
            raise CheckpointMismatch(
                f"the loader's sampler gives epoch {self._sampler.epoch} another order than when the position was "
                "saved, so samples would repeat or be missed; let it draw from torch's generator, or follow set_epoch."
            )


def _agreed_seed(
    loader: DataLoader[Any], length: int | None, split_batches: bool, coordinator: Collectives
) -> tuple[int, bool]:
    """Check that all ranks hold the same loader; return rank 0's seed."""
    mine = {
        "dataset": "one with indices",
        "samples": length,
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "sampler": type(loader.sampler).__name__,
        "split_batches": split_batches,
    }
    return check_same_data(mine, seed_of(loader), coordinator)


def _global_batch(loader: DataLoader[Any], world_size: int, split_batches: bool) -> int:
    if loader.batch_size is None:
        if split_batches:
            raise InvalidOption(
                "split_batches needs a batch size to split, but the loader has a batch sampler or no batches; whole "
                "batches are dealt out to ranks in turn with split_batches=False."
            )
        return world_size
    if not split_batches:
        return loader.batch_size * world_size
    if loader.batch_size % world_size:
        below = loader.batch_size - loader.batch_size % world_size
        fits = f"{below} or {below + world_size}" if below else f"{world_size}"
        raise InvalidOption(
            f"a batch of {loader.batch_size} does not divide into equal parts for {world_size} data-parallel ranks; "
            f"take a batch size of {fits}."
        )
    return loader.batch_size


def _rebuilt(loader: DataLoader[Any], sampler: ResumableSampler, generator: torch.Generator) -> DataLoader[Any]:
    """Build a loader that is like the user's but for the sampler and the generator."""
    whole = loader.batch_sampler is None
    chosen: dict[str, Any] = {"sampler": sampler, "batch_size": None} if whole else {"batch_sampler": sampler}
    if loader.num_workers > 0:
        chosen |= {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
            "timeout": loader.timeout,
        }
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        pin_memory_device=loader.pin_memory_device,
        worker_init_fn=loader.worker_init_fn,
        generator=generator,
        in_order=loader.in_order,
        **chosen,
    )
