"""In which order samples come: a function of the seed and the epoch, never of the world size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from shard_core.errors import InvalidOption

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from shard_core.collectives.interface import Collectives


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """The order of one loader's samples.

    Attributes:
        kind: ``"sequential"``, ``"shuffled"``, or ``"sampler"`` and ``"batch sampler"`` for the user's own.
        seed: What shuffled orders are drawn from, with the epoch.
        chosen: Whether the user gave the loader this seed, rather than torch.
        count: How many items an epoch has; an own sampler may give a different number in some epochs.
        items: Lists the items of an epoch, given a seed and the epoch; every rank calls it.
        pad: Whether the end of an epoch is filled up so that every rank gets as many; otherwise it is cut.
        first_epoch: Where counting starts.
    """

    kind: str
    seed: int
    count: int
    items: Callable[[int, int], Sequence[Any] | torch.Tensor]
    chosen: bool = True
    pad: bool = True
    first_epoch: int = 0


def seed_of(loader: DataLoader[Any]) -> tuple[int, bool]:
    """Find what the user seeded a loader with: a generator, a sampler's seed, or torch itself.

    Args:
        loader: The user's loader.

    Returns:
        The seed, and whether it was given to this loader.
    """
    if isinstance(loader.sampler, DistributedSampler):
        return loader.sampler.seed, True
    chosen = loader.batch_sampler if _has_own_batches(loader) else loader.sampler
    for generator in (getattr(chosen, "generator", None), loader.generator):
        if isinstance(generator, torch.Generator):
            return _seed(generator.initial_seed()), True
    return _seed(torch.initial_seed()), False


def order_of(
    loader: DataLoader[Any], *, seed: int, chosen: bool, rank: int, world_size: int, coordinator: Collectives
) -> Order:
    """Find a loader's order.

    Args:
        loader: The user's loader over a map-style dataset.
        seed: Rank 0's seed.
        chosen: Whether the user gave it to the loader.
        rank: This rank's place among those that see different data.
        world_size: How many those are.
        coordinator: Through which rank 0 broadcasts what the user's own sampler yields.

    Returns:
        The order, alike on every rank.

    Raises:
        InvalidOption: If the sampler deals samples out to other ranks than there are, or never ends.
    """
    sampler = loader.sampler
    if _has_own_batches(loader):
        return _from_rank_0("batch sampler", loader.batch_sampler, seed, coordinator)
    if type(sampler) is SequentialSampler:
        return _sequential(len(sampler), seed)
    if type(sampler) is RandomSampler:
        size, drawn, replacement = len(sampler.data_source), sampler.num_samples, sampler.replacement
        return Order(
            kind="shuffled",
            seed=seed,
            chosen=chosen,
            count=drawn,
            items=lambda seed, epoch: shuffled(size, drawn, seed=seed, epoch=epoch, replacement=replacement),
        )
    if type(sampler) is DistributedSampler:
        return _distributed(sampler, rank, world_size)
    if hasattr(sampler, "num_replicas"):
        raise InvalidOption(
            f"the loader's {type(sampler).__name__} deals samples out to ranks itself; hand process_dataloader "
            "a sampler over all the data, it gives each rank its share."
        )
    return _from_rank_0("sampler", sampler, seed, coordinator)


def shuffled(size: int, count: int, *, seed: int, epoch: int, replacement: bool = False) -> torch.Tensor:
    """Draw the order of one epoch, the same on every rank and at every world size.

    Args:
        size: How many samples there are.
        count: How many to draw.
        seed: What to draw from, with ``epoch``; torch's ``DistributedSampler`` adds them too.
        epoch: Which epoch.
        replacement: Whether a sample may come again before all others came.

    Returns:
        Indices of samples.

    Example:
        >>> shuffled(5, 5, seed=0, epoch=0).tolist() == shuffled(5, 5, seed=0, epoch=1).tolist()
        False
        >>> sorted(shuffled(3, 6, seed=0, epoch=0).tolist())
        [0, 0, 1, 1, 2, 2]
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    if replacement:
        return torch.randint(size, (count,), generator=generator)
    rounds = [torch.randperm(size, generator=generator) for _ in range(-(-count // size) if size else 0)]
    return torch.cat(rounds)[:count] if rounds else torch.empty(0, dtype=torch.int64)


def _seed(initial: int) -> int:
    """Return a seed with room for the epoch: torch reports a negative one as just below 2**64."""
    return initial % 2**63


def _has_own_batches(loader: DataLoader[Any]) -> bool:
    return loader.batch_size is None and loader.batch_sampler is not None


def _sequential(count: int, seed: int, **options: Any) -> Order:
    return Order(kind="sequential", seed=seed, count=count, items=lambda _seed, _epoch: range(count), **options)


def _distributed(sampler: DistributedSampler[Any], rank: int, world_size: int) -> Order:
    if (sampler.rank, sampler.num_replicas) != (rank, world_size):
        raise InvalidOption(
            f"the loader's DistributedSampler is made for rank {sampler.rank} of {sampler.num_replicas}, but this is "
            f"data rank {rank} of {world_size}; leave the sampler out: process_dataloader gives each rank its share."
        )
    size, seed = len(sampler.dataset), sampler.seed  # type: ignore[arg-type]  # torch asks for a length too
    options: dict[str, Any] = {"pad": not sampler.drop_last, "first_epoch": sampler.epoch}
    if not sampler.shuffle:
        return _sequential(size, seed, **options)
    return Order(
        kind="shuffled",
        seed=seed,
        count=size,
        items=lambda seed, epoch: shuffled(size, size, seed=seed, epoch=epoch),
        **options,
    )


def _from_rank_0(kind: str, sampler: Any, seed: int, coordinator: Collectives) -> Order:
    """Return the order that rank 0's sampler has: the user's own may not yield the same on every rank."""
    try:
        count = len(sampler)
    except TypeError as error:
        raise InvalidOption(
            f"the loader's {type(sampler).__name__} has no length, so ranks cannot agree on where an epoch ends; give "
            "it a __len__ and an end, or put it into an IterableDataset."
        ) from error

    def items(seed: int, epoch: int) -> list[Any]:
        listed = _listed(sampler, seed, epoch) if coordinator.rank == 0 else []
        return coordinator.broadcast_any(listed)  # what a user's sampler gives may be of any class

    return Order(kind=kind, seed=seed, count=count, items=items)


def _listed(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """List a sampler's items so that the same epoch has the same again, if it draws from torch."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + epoch)
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed + epoch)
        return list(sampler)
