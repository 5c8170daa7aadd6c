"""Loaders, samplers and ways to read them that the tests of this folder share."""

from __future__ import annotations

import itertools
import json

import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.collectives.single import SingleCollectives
from shard_core.data import ShardedLoader


class Backwards(Sampler):
    """The user's own order; on another rank it would be another one."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        turn = dist.get_rank() if dist.is_initialized() else 0
        order = list(reversed(range(self.length)))
        return iter(order[turn:] + order[:turn])


class Fickle(Sampler):
    """Gives another order every time it is asked, and nothing makes it repeat one."""

    def __init__(self, length):
        self.length, self.asked = length, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        self.asked += 1
        return iter([(index + self.asked) % self.length for index in range(self.length)])


class Endless(Sampler):
    def __iter__(self):
        return itertools.count()


class Lengths(Sampler):
    """Batches of different sizes."""

    def __len__(self):
        return 5

    def __iter__(self):
        return iter([[0], [1, 2], [3, 4, 5], [6], [7, 8]])


class Stream(IterableDataset):
    """Gives every rank everything, unless ``apart`` says how far each rank's first sample is from the last rank's."""

    def __init__(self, length=6, *, apart=0):
        self.length, self.apart = length, apart

    def __iter__(self):
        start = self.apart * dist.get_rank() if dist.is_initialized() else 0
        return iter(range(start, start + self.length))


class StreamWithState(Stream):
    """Goes on where it was left."""

    position = 0

    def __iter__(self):
        for sample in itertools.islice(super().__iter__(), self.position, None):
            self.position += 1
            yield sample
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class LoaderWithState(DataLoader):
    """Knows how many batches it has handed out, as loaders of libraries that stream do."""

    taken = first = 0

    def __iter__(self):
        self.taken, self.first = self.first, 0
        for batch in itertools.islice(super().__iter__(), self.taken, None):
            self.taken += 1
            yield batch

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.first = state["taken"]


def plain(length, **options):
    return DataLoader(range(length), **options)


def with_sampler(length, kind, **options):
    samplers = {
        "own": lambda: Backwards(length),
        "weighted": lambda: WeightedRandomSampler([1.0] * length, length, replacement=False),
        "weighted with a generator": lambda: WeightedRandomSampler(
            [1.0] * length, length, replacement=False, generator=torch.Generator().manual_seed(5)
        ),
        "subset": lambda: SubsetRandomSampler(range(length)),
        "fickle": lambda: Fickle(length),
    }
    return DataLoader(range(length), sampler=samplers[kind](), **options)


def with_distributed_sampler(length, **options):
    sampler = DistributedSampler(range(length), dist.get_world_size(), dist.get_rank(), **options)
    return DataLoader(range(length), batch_size=4, sampler=sampler)


def sharded(loader, **options):
    alone = not dist.is_initialized()
    coordinator = SingleCollectives() if alone else ProcessGroupCollectives()
    if not alone:
        coordinator.connect(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    arguments = {"rank": coordinator.rank, "world_size": coordinator.world_size} | options
    return ShardedLoader(loader, coordinator=coordinator, transfer=lambda batch: batch, **arguments)


def read(make, arguments, options, state=None, steps=None):
    """Build a loader, go to a position, read some batches (or the rest of the epoch) and return the new position."""
    loader = sharded(make(**arguments), **options)
    if state is not None:
        loader.load_state_dict(state)
    batches = [batch.tolist() for batch in itertools.islice(loader, steps)]
    return batches, json.loads(json.dumps(loader.state_dict()))


def run(worlds, size, function, *args):
    return [function(*args)] if size == 1 else worlds(size).run(function, *args)


def steps_of(results):
    """Put the ranks' shares of each step back together; every rank must have as many."""
    shares = [batches for batches, _ in results]
    assert len({tuple(map(len, batches)) for batches in shares}) == 1, "ranks see unequal batches"
    return [sorted(itertools.chain(*step)) for step in zip(*shares, strict=True)]


def read_seeded(*args):
    torch.manual_seed(11)
    return read(*args)


def all_of(loader):
    return [sample for batch in loader for sample in batch.tolist()]
