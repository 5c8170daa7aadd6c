from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from loaders import all_of, plain, read, read_seeded, run, sharded, steps_of, with_distributed_sampler, with_sampler
from torch.utils.data import DataLoader, DistributedSampler


def _torch_batches(length, world_size, rank, shuffle, seed, epoch):
    sampler = DistributedSampler(range(length), world_size, rank, shuffle=shuffle, seed=seed)
    sampler.set_epoch(epoch)
    return [batch.tolist() for batch in DataLoader(range(length), batch_size=4, sampler=sampler)]


def _two_epochs(length, shuffle, seed, own_sampler):
    if own_sampler:
        loader = with_distributed_sampler(length, shuffle=shuffle, seed=seed)
    else:
        torch.manual_seed(seed)
        loader = plain(length, batch_size=4, shuffle=shuffle)
    mine = sharded(loader)
    return [[batch.tolist() for batch in mine] for _ in range(2)], len(mine)


@pytest.mark.parametrize("own_sampler", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("length", [23, 24, 25, 1])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_gets_the_batches_of_torchs_distributed_sampler(worlds, world_size, length, shuffle, own_sampler):
    results = worlds(world_size).run(_two_epochs, length, shuffle, 7, own_sampler)
    for rank, (epochs, count) in enumerate(results):
        assert epochs == [_torch_batches(length, world_size, rank, shuffle, 7, epoch) for epoch in (0, 1)]
        assert count == len(epochs[0])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [29, 30])
@pytest.mark.parametrize(
    ("make", "extra"),
    [(plain, {"shuffle": True}), (plain, {}), (with_sampler, {"kind": "own"}), (with_sampler, {"kind": "subset"})],
    ids=["shuffled", "sequential", "own sampler", "subset"],
)
def test_global_batches_are_the_same_at_every_world_size(worlds, make, extra, length, drop_last):
    arguments = {"length": length, "batch_size": 6, "drop_last": drop_last, **extra}
    runs = [steps_of(run(worlds, size, read_seeded, make, arguments, {"split_batches": True})) for size in (1, 2, 3)]
    whole = length // 6
    assert len(runs[0]) == len(runs[1]) == len(runs[2]) == (whole if drop_last else 5)
    assert runs[0][:whole] == runs[1][:whole] == runs[2][:whole]
    assert len({sample for step in runs[0][:whole] for sample in step}) == 6 * whole
    if not drop_last:
        assert all({sample for step in run for sample in step} == set(range(length)) for run in runs)


def test_ranks_that_share_their_data_get_the_same(worlds):
    arguments = {"length": 20, "batch_size": 3, "shuffle": True}
    first, second = worlds(2).run(read, plain, arguments, {"rank": 0, "world_size": 1})
    assert first == second
    assert sorted(itertools.chain(*first[0])) == list(range(20))


@pytest.mark.parametrize("length", [5, 6, 7])
def test_a_distributed_sampler_that_drops_its_tail_is_honoured(worlds, length):
    results = worlds(2).run(read, with_distributed_sampler, {"length": length, "drop_last": True}, {})
    seen = [sample for batches, _ in results for batch in batches for sample in batch]
    assert len(seen) == len(set(seen)) == length // 2 * 2


def test_iterating_draws_no_random_numbers_of_the_users():
    loader = sharded(plain(12, batch_size=4, shuffle=True))
    before = torch.get_rng_state()
    assert len(all_of(loader)) == 12
    assert torch.equal(torch.get_rng_state(), before)


def test_the_generator_or_torchs_seed_decides_the_order():
    def order(seed, **options):
        torch.manual_seed(seed)
        return all_of(sharded(plain(30, batch_size=5, shuffle=True, **options)))

    assert order(1) == order(1) != order(2)
    same = [order(seed, generator=torch.Generator().manual_seed(9)) for seed in (1, 2)]
    assert same[0] == same[1] != order(1)
    assert sorted(order(-1)) == list(range(30))


class _Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(())


def _noise(rank):
    torch.manual_seed(0)
    return [v for batch in sharded(DataLoader(_Noise(), 2, num_workers=1), rank=rank, world_size=2) for v in batch]


def test_workers_of_different_ranks_and_epochs_draw_different_numbers():
    assert _noise(0) == _noise(0)
    assert set(map(float, _noise(0))).isdisjoint(map(float, _noise(1)))
    loader = sharded(DataLoader(_Noise(), 2, num_workers=1))
    first, second = ([float(v) for batch in loader for v in batch] for _ in range(2))
    assert set(first).isdisjoint(second)


class _Draws(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index, float(torch.rand(())), float(np.random.rand()), random.random()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("batch_size", [3, None])
def test_workers_draw_the_same_numbers_after_a_resume(persistent, batch_size):
    def made():
        torch.manual_seed(0)
        workers = {"num_workers": 2, "persistent_workers": persistent}
        return sharded(DataLoader(_Draws(), batch_size, shuffle=batch_size is not None, **workers), world_size=2)

    def numbers(batches):
        return [[torch.as_tensor(each).tolist() for each in batch] for batch in batches]

    loader = made()
    whole = [numbers(loader) for _ in range(2)]
    assert whole[0] != whole[1]
    interrupted = made()
    first = numbers(itertools.islice(interrupted, 2))
    state = interrupted.state_dict()
    resumed = made()
    resumed.load_state_dict(state)
    assert [first + numbers(resumed), numbers(resumed)] == whole
