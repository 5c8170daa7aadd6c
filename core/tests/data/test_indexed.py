from __future__ import annotations

import itertools
import json

import pytest
import torch
from loaders import all_of, plain, read_seeded, run, sharded, steps_of, with_sampler


@pytest.mark.parametrize("sizes", [(1, 2, 3), (3, 1, 2), (2, 3, 2), (2, 2, 1)])
@pytest.mark.parametrize("length", [30, 35])
@pytest.mark.parametrize(
    ("make", "extra"),
    [(plain, {"shuffle": True}), (with_sampler, {"kind": "own"}), (with_sampler, {"kind": "weighted"})],
    ids=["shuffled", "own sampler", "weighted"],
)
def test_resuming_at_other_world_sizes_gives_the_uninterrupted_batches(worlds, make, extra, length, sizes):
    arguments = {"length": length, "batch_size": 6, **extra}
    split = {"split_batches": True}
    expected = steps_of([read_seeded(make, arguments, split)])
    steps, state = [], None
    for size, count in zip(sizes, (2, 1, None), strict=True):
        results = run(worlds, size, read_seeded, make, arguments, split, state, count)
        steps += steps_of(results)
        assert len({json.dumps(saved) for _, saved in results}) == 1, "ranks save different positions"
        state = results[0][1]
    assert steps[:5] == expected[:5]
    assert {sample for step in steps for sample in step} == set(range(length))


@pytest.mark.parametrize("sizes", [(1, 2, 3), (3, 2, 1)])
def test_with_a_batch_size_per_rank_no_sample_is_lost_or_repeated(worlds, sizes):
    arguments = {"length": 36, "batch_size": 3, "shuffle": True}
    seen, state = [], None
    for size, count in zip(sizes, (2, 1, None), strict=True):
        results = run(worlds, size, read_seeded, plain, arguments, {}, state, count)
        seen += itertools.chain(*steps_of(results))
        state = results[0][1]
    assert sorted(seen) == list(range(36))


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_batches_that_workers_fetched_ahead_do_not_count(worlds, taken):
    arguments = {"length": 40, "batch_size": 4, "shuffle": True, "num_workers": 2, "prefetch_factor": 4}
    results = worlds(2).run(read_seeded, plain, arguments, {}, None, taken)
    assert [state["position"] for _, state in results] == [8 * taken] * 2
    rest = worlds(2).run(read_seeded, plain, arguments, {}, results[0][1])
    assert sorted(itertools.chain(*steps_of(results), *steps_of(rest))) == list(range(40))


def test_workers_that_live_on_and_run_in_order_give_every_epoch_whole():
    options = {"num_workers": 1, "persistent_workers": True, "shuffle": True}
    loader = sharded(plain(10, batch_size=3, **options))
    assert next(iter(loader)).tolist()
    rest = [sample for batch in loader for sample in batch.tolist()]
    second = [sample for batch in loader for sample in batch.tolist()]
    assert len(rest) == 7
    assert sorted(second) == list(range(10))


def test_every_iter_is_the_next_epoch_in_another_order():
    loader = sharded(plain(20, batch_size=4, shuffle=True))
    first, second = all_of(loader), all_of(loader)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert loader.epoch == 1


def test_an_iter_left_early_goes_on_and_set_epoch_begins_afresh():
    loader = sharded(plain(12, batch_size=4))
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    assert next(iter(loader)).tolist() == [4, 5, 6, 7]
    loader.set_epoch(0)
    assert next(iter(loader)).tolist() == [8, 9, 10, 11]
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    loader.set_epoch(loader.epoch + 1)
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]


def test_set_epoch_chooses_the_order():
    loader = sharded(plain(20, batch_size=4, shuffle=True))
    third = [all_of(loader) for _ in range(3)][2]
    again = sharded(plain(20, batch_size=4, shuffle=True))
    again.set_epoch(2)
    assert all_of(again) == third
    again.set_epoch(2)
    assert all_of(again) == third


def _finished():
    loader = sharded(plain(8, batch_size=4))
    all_of(loader)
    return loader.state_dict()


def test_after_a_finished_epoch_the_next_begins():
    loader = sharded(plain(8, batch_size=4))
    loader.load_state_dict(_finished())
    assert all_of(loader) == list(range(8))
    assert loader.epoch == 1


def test_a_script_that_names_its_epochs_repeats_none_when_it_resumes():
    loader = sharded(plain(8, batch_size=4))
    loader.load_state_dict(_finished())
    seen = {}
    for epoch in range(2):
        loader.set_epoch(epoch)
        seen[epoch] = all_of(loader)
    assert seen == {0: [], 1: list(range(8))}


def test_a_script_that_names_its_epochs_goes_on_in_the_middle():
    saved = sharded(plain(8, batch_size=4))
    next(iter(saved))
    loader = sharded(plain(8, batch_size=4))
    loader.load_state_dict(saved.state_dict())
    loader.set_epoch(0)
    assert all_of(loader) == [4, 5, 6, 7]


@pytest.mark.parametrize("extra", [{"shuffle": True}, {"kind": "weighted"}], ids=["shuffled", "weighted"])
def test_a_seed_that_only_torch_knew_is_taken_up_again(extra):
    def make(seed):
        torch.manual_seed(seed)
        build = with_sampler if "kind" in extra else plain
        return sharded(build(length=20, batch_size=4, **extra))

    saved, resumed = make(1), make(2)
    head = next(iter(saved)).tolist()
    resumed.load_state_dict(saved.state_dict())
    rest, next_epoch = all_of(resumed), all_of(resumed)
    assert rest == all_of(saved)
    assert sorted(head + rest) == list(range(20))
    assert next_epoch == all_of(saved)
