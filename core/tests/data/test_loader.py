from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from loaders import Endless, Lengths, Stream, plain, read, sharded
from torch.utils.data import DataLoader, DistributedSampler

from shard_core.collectives.single import SingleCollectives
from shard_core.data import ShardedLoader
from shard_core.data.indexed import IndexedFeed
from shard_core.errors import CheckpointMismatch, InvalidOption, RankFailed


def test_the_loaders_own_settings_are_kept():
    def collate(samples):
        return {"samples": samples}

    loader = sharded(DataLoader(list("abcde"), 2, collate_fn=collate, drop_last=True))
    assert list(loader) == [{"samples": ["a", "b"]}, {"samples": ["c", "d"]}]
    assert loader.dataset == list("abcde")


class _Marked(torch.utils.data.Dataset):
    mark = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.mark


def _mark(worker):
    torch.utils.data.get_worker_info().dataset.mark = 10 + worker


def test_worker_settings_are_kept():
    loader = sharded(DataLoader(_Marked(), 2, num_workers=2, worker_init_fn=_mark))
    assert [batch.tolist() for batch in loader] == [[10, 10], [11, 11]]


def test_settings_that_change_no_batch_are_kept():
    settings = {
        "num_workers": 2,
        "timeout": 30,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "pin_memory": True,
        "in_order": False,
        "worker_init_fn": _mark,
        "collate_fn": list,
    }
    original = DataLoader(range(9), 2, multiprocessing_context="spawn", **settings)
    feed = IndexedFeed(original, rank=0, world_size=1, coordinator=SingleCollectives(), split_batches=False)
    assert {name: getattr(feed.loader, name) for name in settings} == settings
    assert feed.loader.multiprocessing_context is original.multiprocessing_context


def test_batches_are_transferred():
    loader = ShardedLoader(
        plain(4, batch_size=2), rank=0, world_size=1, coordinator=SingleCollectives(), transfer=lambda b: b.to("meta")
    )
    assert [batch.device.type for batch in loader] == ["meta", "meta"]


def test_an_empty_dataset_gives_nothing():
    loader = sharded(DataLoader([], batch_size=2))
    assert list(loader) == []
    assert len(loader) == 0


@pytest.mark.parametrize(("batch_size", "world_size", "fits"), [(10, 3, "9 or 12"), (1, 2, "2"), (7, 2, "6 or 8")])
def test_a_batch_that_does_not_divide(batch_size, world_size, fits):
    with pytest.raises(InvalidOption, match=f"a batch of {batch_size} does not divide .* batch size of {fits}"):
        sharded(plain(30, batch_size=batch_size), rank=0, world_size=world_size, split_batches=True)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: [1, 2], {}, "takes a torch DataLoader, not list"),
        (lambda: DataLoader(range(9), sampler=Endless()), {}, "Endless has no length"),
        (
            lambda: DataLoader(range(9), batch_sampler=Lengths()),
            {"split_batches": True},
            "needs a batch size to split",
        ),
        (lambda: DataLoader(Stream(), 2), {"split_batches": True}, "needs a dataset with indices"),
        (lambda: DataLoader(range(9), sampler=DistributedSampler(range(9), 4, 1)), {}, "rank 1 of 4, .* rank 0 of 1"),
        (lambda: DataLoader(range(9), sampler=_OwnShare(range(9), 1, 0)), {}, "_OwnShare deals samples out"),
        (lambda: _OwnIteration(range(9)), {}, "_OwnIteration iterates in its own way"),
    ],
)
def test_loaders_that_cannot_be_shared_out(make, options, message):
    with pytest.raises(InvalidOption, match=message):
        sharded(make(), **options)


class _OwnShare(DistributedSampler):
    pass


class _OwnIteration(DataLoader):
    def __iter__(self):
        return super().__iter__()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 13, "batch_size": 3, "shuffle": True}, "the dataset had 12 samples and has 13"),
        ({"length": 12, "batch_size": 3}, "the order was 'shuffled' and is 'sequential'"),
        (
            {"length": 12, "batch_size": 3, "shuffle": True, "generator": torch.Generator().manual_seed(4)},
            "the loader's seed was 3 and is 4",
        ),
    ],
)
def test_a_position_in_other_data_is_refused(arguments, message):
    generator = torch.Generator().manual_seed(3)
    _, state = read(plain, {"length": 12, "batch_size": 3, "shuffle": True, "generator": generator}, {}, None, 1)
    with pytest.raises(CheckpointMismatch, match=f"cannot go on where it was saved: {message}"):
        read(plain, arguments, {}, state)


def _loader_that_depends_on_the_rank():
    sharded(plain(20 + dist.get_rank(), batch_size=2))


def test_ranks_with_different_data_are_told(worlds):
    with pytest.raises(RankFailed, match="samples is 21 on rank 1 and 20 on rank 0") as failure:
        worlds(2).run(_loader_that_depends_on_the_rank)
    assert "failed on 2 of 2 ranks" in str(failure.value)
