from __future__ import annotations

import pytest
import torch
from loaders import Lengths, all_of, read, sharded, with_sampler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from shard_core.errors import CheckpointMismatch


@pytest.mark.parametrize("kind", ["weighted", "weighted with a generator", "subset"])
def test_samplers_that_draw_from_torch_repeat_an_epoch_and_not_the_last(kind):
    def two_epochs():
        loader = sharded(with_sampler(30, kind, batch_size=5))
        return all_of(loader), all_of(loader)

    torch.manual_seed(3)
    first, second = two_epochs()
    torch.manual_seed(3)
    assert two_epochs() == (first, second)
    assert first != second


def test_a_sampler_that_never_repeats_an_order_cannot_resume():
    saved = sharded(with_sampler(9, "fickle", batch_size=3))
    next(iter(saved))
    raw = with_sampler(9, "fickle", batch_size=3)
    list(raw.sampler)
    loader = sharded(raw)
    loader.load_state_dict(saved.state_dict())
    with pytest.raises(CheckpointMismatch, match="gives epoch 0 another order than when the position was saved"):
        all_of(loader)


def test_drawing_with_replacement_keeps_its_number():
    sampler = RandomSampler(range(10), replacement=True, num_samples=33)
    loader = sharded(DataLoader(range(10), 8, sampler=sampler))
    seen = all_of(loader)
    assert len(seen) == 33
    assert len(set(seen)) > 5
    assert len(loader) == 5


def _batch_loader():
    return DataLoader(range(9), batch_sampler=Lengths())


def test_own_batches_are_dealt_out_whole_in_turn(worlds):
    (first, state), (second, _) = worlds(2).run(read, _batch_loader, {}, {})
    assert first == [[0], [3, 4, 5], [7, 8]]
    assert second == [[1, 2], [6], [0]]
    assert state["position"] == 5


def test_own_batches_resume_at_another_world_size(worlds):
    results = worlds(2).run(read, _batch_loader, {}, {}, None, 1)
    assert read(_batch_loader, {}, {}, results[0][1])[0] == [[3, 4, 5], [6], [7, 8]]


def test_a_batch_sampler_around_a_sampler_is_dealt_out_too():
    sampler = BatchSampler(RandomSampler(range(10)), 4, drop_last=False)
    assert sorted(all_of(sharded(DataLoader(range(10), batch_sampler=sampler)))) == list(range(10))


def test_a_loader_without_batches_gives_single_items(worlds):
    results = worlds(2).run(_single_items)
    assert results == [[0, 2, 4], [1, 3, 0]]


def _single_items():
    return list(sharded(DataLoader(list(range(5)), batch_size=None)))
