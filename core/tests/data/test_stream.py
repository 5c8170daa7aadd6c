from __future__ import annotations

import dataclasses
import logging
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from loaders import LoaderWithState, Stream, StreamWithState, read, run, sharded
from torch.utils.data import DataLoader, IterableDataset

from shard_core import get_strategy
from shard_core.errors import CheckpointError, CheckpointMismatch, InvalidOption, RankFailed

_SAMPLES = 23
_ALL = [list(range(start, min(start + 2, _SAMPLES))) for start in range(0, _SAMPLES, 2)]
"""The batches of a stream: twelve, the last of them with one sample."""


def whole(dataset=Stream, length=_SAMPLES, batch_size=2, **options):
    return DataLoader(dataset(length), batch_size=batch_size, **options)


def own(dataset=Stream, length=6):
    return DataLoader(dataset(length, apart=100), batch_size=2)


def with_state(apart, **options):
    return LoaderWithState(Stream(_SAMPLES, apart=apart), batch_size=2, **options)


@dataclasses.dataclass
class Split:
    """What Hugging Face's ``split_dataset_by_node`` leaves on a dataset."""

    rank: int
    world_size: int


def marked(apart, world_size=None):
    loader = DataLoader(Stream(apart=apart), batch_size=2)
    loader.dataset._distributed = Split(dist.get_rank(), world_size or dist.get_world_size())
    return loader


def opaque():
    return whole(collate_fn=lambda samples: lambda: samples)


def batches_of(make, arguments, options, epochs=1):
    loader = sharded(make(**arguments), **options)
    return [[batch.tolist() for batch in loader] for _ in range(epochs)]


# Shared by batches.


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"shard_stream": True}])
def test_batch_n_goes_to_rank_n_modulo_the_world(worlds, size, options):
    shares = run(worlds, size, batches_of, whole, {"length": 21}, options, 2)
    expected = [[2 * number, 2 * number + 1] for number in range(10)] + [[20]]
    rounds = len(expected) // size
    assert shares == [[expected[rank : rounds * size : size]] * 2 for rank in range(size)]


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5])
def test_every_rank_takes_as_many_however_few_there_are(worlds, length):
    shares = worlds(2).run(batches_of, whole, {"length": length, "batch_size": 1}, {})
    assert shares == [[[[each] for each in range(rank, length // 2 * 2, 2)]] for rank in range(2)]


def test_worker_processes_read_as_they_do_without_us(worlds):
    plain = [batch.tolist() for batch in whole(num_workers=2)]
    shares = worlds(2).run(batches_of, whole, {"num_workers": 2}, {}, 2)
    assert shares == [[plain[rank : len(plain) // 2 * 2 : 2]] * 2 for rank in range(2)]


def test_ranks_of_one_data_rank_see_the_same(worlds):
    shares = worlds(4).run(_on_two_data_ranks)
    assert shares == [_ALL[0::2], _ALL[0::2], _ALL[1::2], _ALL[1::2]]


def _on_two_data_ranks():
    return batches_of(whole, {}, {"rank": dist.get_rank() // 2, "world_size": 2})[0]


def test_what_is_left_out_is_logged_once_and_by_rank_0(worlds):
    lines = worlds(3).run(_logged, 20)
    assert lines[1:] == [[], []]
    assert lines[0] == [
        "the last 1 of the 10 batches of epoch 0 of an IterableDataset were left out: 3 data-parallel ranks take "
        "equally many; this is logged once."
    ]
    assert worlds(3).run(_logged, 18) == [[], [], []]


def _logged(length):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("shard_core")
    logger.addHandler(handler)
    try:
        batches_of(whole, {"length": length}, {}, 2)
    finally:
        logger.removeHandler(handler)
    return lines


class _Sized(Stream):
    def __len__(self):
        return self.length


def test_the_length_is_that_of_a_share(worlds):
    assert worlds(2).run(_lengths, {"shard_stream": True}) == [(6, 6)] * 2
    assert worlds(2).run(_lengths, {"shard_stream": False}) == [(12, 12)] * 2
    assert worlds(2).run(_lengths, {}) == [("pass shard_stream=True or False to process_dataloader", 6)] * 2
    assert _lengths({}) == (12, 12)


def _lengths(options):
    loader = sharded(whole(_Sized), **options)
    try:
        before = len(loader)
    except TypeError as error:
        before = str(error).partition("; ")[2].partition(" to have")[0]
    list(loader)
    return before, len(loader)


def test_left_early_it_begins_afresh_as_without_us(worlds):
    assert worlds(2).run(_left_early) == [([0, 1], [0, 1]), ([2, 3], [2, 3])]


def _left_early():
    loader = sharded(whole())
    return next(iter(loader)).tolist(), next(iter(loader)).tolist()


# Sharded by itself.


@pytest.mark.parametrize(
    ("make", "arguments", "options"),
    [(own, {}, {"shard_stream": False}), (marked, {"apart": 100}, {})],
    ids=["said by the user", "split by its library"],
)
def test_a_stream_that_shards_itself_is_not_shared_again(worlds, make, arguments, options):
    first = [[0, 1], [2, 3], [4, 5]]
    assert worlds(2).run(batches_of, make, arguments, options) == [[first], [[[100 + k for k in b] for b in first]]]


def test_a_loader_with_state_is_not_shared_again(worlds):
    shares = worlds(2).run(batches_of, with_state, {"apart": 100}, {})
    assert shares == [[_ALL], [[[100 + sample for sample in batch] for batch in _ALL]]]


def test_a_split_over_one_rank_is_none(worlds):
    shares = worlds(2).run(batches_of, marked, {"apart": 0, "world_size": 1}, {})
    assert shares == [[[[0, 1]]], [[[2, 3]]]]


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (own, {}, "streams begin with different batches, .* pass shard_stream=True .* or shard_stream=False"),
        (marked, {"apart": 0}, "all ranks begin with the same batch; pass shard_stream=True"),
        (with_state, {"apart": 0}, "all ranks begin with the same batch; pass shard_stream=True"),
        (opaque, {}, "cannot be compared; pass shard_stream=True"),
    ],
    ids=["no mark", "split alike", "a loader with state over all data", "a batch that is no value"],
)
def test_what_nothing_says_is_not_guessed(worlds, make, arguments, message):
    with pytest.raises(RankFailed, match=message) as failure:
        worlds(2).run(batches_of, make, arguments, {})
    assert "failed on 2 of 2 ranks" in str(failure.value)


class _Shuffled(Stream):
    """Gives every epoch in an order that a generator of Python's draws."""

    def __iter__(self):
        return iter(random.sample(range(self.length), self.length))


def test_ranks_that_shuffle_in_their_own_way_later_are_told(worlds):
    assert worlds(2).run(_shuffled_epochs, 0)[0] == 2
    with pytest.raises(RankFailed, match="begin with different batches"):
        worlds(2).run(_shuffled_epochs, 1)


def _shuffled_epochs(apart):
    random.seed(0)
    loader = sharded(whole(_Shuffled))
    list(loader)
    random.seed(1 + apart * dist.get_rank())
    list(loader)
    return loader.epoch


class _Longer(Stream):
    """Gives rank 1 more."""

    def __iter__(self):
        return iter(range(self.length + 2 * self.extra * dist.get_rank()))


class _OneMore(_Longer):
    extra = 1


def test_streams_that_end_apart_are_refused(worlds):
    with pytest.raises(RankFailed, match=r"it gave them \[2, 3\] batches in epoch 0; .* pass shard_stream=False"):
        worlds(2).run(batches_of, whole, {"dataset": _OneMore, "length": 4}, {})


class _MuchLonger(_Longer):
    extra = 4


def test_a_rank_that_goes_on_alone_is_named(worlds):
    with pytest.raises(RankFailed, match=r"in 'the end of epoch 0 of an IterableDataset that ranks share' for rank 1"):
        worlds(2).run(_reduces_in_each_step)


def _reduces_in_each_step():
    with get_strategy("ddp", accelerator="cpu", guard_timeout=timedelta(seconds=3)) as strategy:
        for batch in strategy.process_dataloader(whole(_MuchLonger, 4)):
            strategy.all_reduce(batch.float())


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: DataLoader(range(9)), {"shard_stream": True}, "for an IterableDataset, and range has indices"),
        (lambda: DataLoader(range(9)), {"shard_stream": False}, "for an IterableDataset, and range has indices"),
        (whole, {"shard_stream": "no"}, "shard_stream is 'no'; give True, False, or None"),
        (whole, {"split_batches": True}, "an IterableDataset is shared by whole batches"),
    ],
)
def test_options_that_mean_nothing(make, options, message):
    with pytest.raises(InvalidOption, match=message):
        sharded(make(), **options)


@pytest.mark.parametrize(
    ("way", "message"),
    [("choice", "shard_stream is False on rank 1 and None on rank 0"), ("kind", "dataset is 'an IterableDataset'")],
)
def test_ranks_that_were_given_different_streams(worlds, way, message):
    with pytest.raises(RankFailed, match=message):
        worlds(2).run(_different, way)


def _different(way):
    if way == "choice":
        sharded(whole(), shard_stream=False if dist.get_rank() else None)
    else:
        sharded(whole() if dist.get_rank() else DataLoader(range(9)))


# Positions.


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize(
    ("make", "arguments", "options"),
    [
        (whole, {"dataset": StreamWithState}, {}),
        (with_state, {"apart": 0, "num_workers": 1}, {"shard_stream": True}),
    ],
    ids=["a dataset with state", "a loader with state"],
)
def test_a_shared_stream_goes_on_at_every_world_size(worlds, sizes, make, arguments, options):
    before, after = sizes
    results = run(worlds, before, read, make, arguments, options, None, 2)
    state = results[0][1]
    assert all(each == state for _, each in results)
    seen = 2 * before
    assert [batches for batches, _ in results] == [_ALL[rank:seen:before] for rank in range(before)]
    resumed = run(worlds, after, read, make, arguments, options, state)
    end = seen + (len(_ALL) - seen) // after * after
    assert [batches for batches, _ in resumed] == [_ALL[seen + rank : end : after] for rank in range(after)]
    assert resumed[0][1]["epoch"] == 1


def test_a_position_that_was_loaded_can_be_saved_before_it_is_used(worlds):
    _, state = worlds(2).run(read, whole, {"dataset": StreamWithState}, {}, None, 1)[0]
    assert worlds(3).run(read, whole, {"dataset": StreamWithState}, {}, state, 0) == [([], state)] * 3


def test_a_stream_that_shards_itself_goes_on_at_its_own_world_size(worlds):
    make = {"dataset": StreamWithState}, {"shard_stream": False}
    results = worlds(2).run(read, own, *make, None, 2)
    assert [batches for batches, _ in results] == [[[0, 1], [2, 3]], [[100, 101], [102, 103]]]
    resumed = worlds(2).run(read, own, *make, results[0][1], 1)
    assert [batches for batches, _ in resumed] == [[[4, 5]], [[104, 105]]]
    with pytest.raises(CheckpointMismatch, match="saved by 2 ranks and cannot be divided among 1"):
        read(own, *make, results[0][1])


def test_what_a_library_has_split_is_not_shared_again():
    loader = DataLoader(Stream(), batch_size=2)
    loader.dataset._distributed = Split(0, 2)
    with pytest.raises(InvalidOption, match="would share Stream a second time: its library has split"):
        sharded(loader, shard_stream=True)


def test_a_position_of_one_kind_of_stream_is_none_of_the_other():
    _, shared = read(whole, {"dataset": StreamWithState}, {}, None, 1)
    with pytest.raises(CheckpointMismatch, match="saved in an IterableDataset that ranks shared"):
        read(whole, {"dataset": StreamWithState}, {"shard_stream": False}, shared)
    with pytest.raises(CheckpointMismatch, match="the order was 'sequential' and is 'stream'"):
        read(whole, {"dataset": StreamWithState}, {}, read(lambda: DataLoader(range(9)), {}, {})[1])


def test_a_shared_position_in_a_stream_that_shards_itself_is_refused_at_the_first_batch(worlds):
    _, shared = read(whole, {"dataset": StreamWithState}, {}, None, 1)
    with pytest.raises(RankFailed, match="saved in an IterableDataset that ranks shared"):
        worlds(2).run(_split_now, shared)


def _split_now(state):
    loader = sharded(DataLoader(StreamWithState(apart=100), batch_size=2))
    loader.dataset._distributed = Split(0, 2)
    loader = sharded(loader._feed.loader)
    loader.load_state_dict(state)
    next(iter(loader))


def test_positions_of_ranks_at_different_places_are_not_shared(worlds):
    state = {"epoch": 0, "order": "stream", "ranks": [{"position": 2}, {"position": 4}]}
    with pytest.raises(RankFailed, match="saved by ranks at different places"):
        worlds(2).run(read, whole, {"dataset": StreamWithState}, {"shard_stream": True}, state)


def test_positions_from_before_streams_were_shared_still_load(worlds):
    state = {"epoch": 3, "order": "stream", "ranks": [{"position": 4}, {"position": 4}]}
    resumed = worlds(2).run(read, whole, {"dataset": StreamWithState}, {}, state)
    assert [batches for batches, _ in resumed] == [_ALL[2::2], _ALL[3::2]]
    assert resumed[0][1]["epoch"] == 4


def test_a_stream_without_state_says_that_its_position_is_unknown():
    with pytest.raises(CheckpointError, match="position of Stream is unknown"):
        sharded(whole()).state_dict()
    with pytest.raises(CheckpointError, match="position of StreamWithState is unknown"):
        sharded(whole(StreamWithState, num_workers=1)).state_dict()


# Training.


class _Pairs(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        for _ in range(30):
            yield torch.randn(4, generator=generator), torch.randn(1, generator=generator)


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


@pytest.mark.parametrize("size", [2, 3])
def test_training_is_that_of_one_device_over_whole_rounds(worlds, size):
    batches = list(DataLoader(_Pairs(), batch_size=2))
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for start in range(0, len(batches) // size * size, size):
        inputs, targets = map(torch.cat, zip(*batches[start : start + size], strict=True))
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for trained in worlds(size).run(_trained):
        torch.testing.assert_close(trained, dict(model.state_dict()), rtol=1e-5, atol=1e-6)


def _trained():
    with get_strategy("ddp", accelerator="cpu") as strategy:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        for inputs, targets in strategy.process_dataloader(DataLoader(_Pairs(), batch_size=2)):
            strategy.backward(torch.nn.functional.mse_loss(model(inputs), targets), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return {name: tensor.detach().clone() for name, tensor in strategy.unwrap(model).state_dict().items()}
