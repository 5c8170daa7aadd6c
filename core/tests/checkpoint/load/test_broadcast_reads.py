"""What several ranks want of a store is read by one of them and broadcast."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import safetensors.numpy
import torch
import xxhash
from fixtures.failing_store import FailingStore
from fixtures.thread_ranks import all_ranks, on_ranks
from torch import nn

from shard_core.checkpoint.format.chunk_index import BLOCK_BYTES
from shard_core.checkpoint.load import broadcast_reads
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.shard import FlatPart
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.errors import CheckpointError

URL = "failing://run/step-1"
#: So many blocks, which are what is read, that two and three parts are whole ones.
BLOCKS = 6


class _Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.matrix = nn.Parameter(torch.rand(BLOCKS, BLOCK_BYTES // 4, generator=generator))
        self.bias = nn.Parameter(torch.rand(7, generator=generator))


def _state(model, coordinator, parts):
    """Describe a model of which each rank holds a copy, or one of several ranges of its matrix."""

    def part(tensor):
        if parts == 1 or tensor is not model.matrix:
            return None
        size = tensor.numel() // parts
        start = coordinator.rank % parts * size
        return FlatPart(
            shape=tuple(tensor.shape), start=start, values=tensor.detach().reshape(-1)[start : start + size]
        )

    size = coordinator.world_size
    return TensorState({"model": model}, {}, rank=coordinator.rank, world_size=size, flat_part=part)


@pytest.fixture(scope="module")
def saved():
    """Save on two ranks; return what is in the store then."""
    FailingStore.fail_at(-1, "before")
    FailingStore.store.clear()

    def save_on(coordinator):
        values = {"window": torch.arange(100.0)}
        io, state = ShardedCheckpointIO(), _state(_Model(1), coordinator, 1)
        io.save(URL, state, values, coordinator=coordinator, information={})

    all_ranks(2, save_on)
    return dict(FailingStore.store)


@pytest.fixture(autouse=True)
def _stored(saved):
    FailingStore.fail_at(-1, "before")
    FailingStore.store.clear()
    FailingStore.store.update(saved)
    FailingStore.given.clear()


def _load_on(models, parts=1):
    def load_on(coordinator):
        state = _state(models[coordinator.rank], coordinator, parts)
        return ShardedCheckpointIO().load(URL, state, coordinator=coordinator).values

    return load_on


def _given():
    """List which bytes of tensors were read."""
    return sorted(each for each in FailingStore.given if each[0].rpartition("/")[2].startswith(("model-", "state-")))


def _total(given):
    return sum(stop - start for _, start, stop in given)


@pytest.mark.parametrize("at_once", [broadcast_reads._BYTES_AT_ONCE, BLOCK_BYTES])
def test_replicas_read_each_byte_once_in_all(monkeypatch, at_once):
    monkeypatch.setattr(broadcast_reads, "_BYTES_AT_ONCE", at_once)
    models, whole = [_Model(2), _Model(3)], _Model(1)
    for model, values in zip(models, all_ranks(2, _load_on(models)), strict=True):
        assert all(map(torch.equal, model.parameters(), whole.parameters()))
        assert torch.equal(values["window"], torch.arange(100.0))
    given = _given()
    assert _total(given) == 4 * (whole.matrix.numel() + whole.bias.numel() + 100)
    assert all(one[0] != next[0] or one[2] <= next[1] for one, next in pairwise(given))


@pytest.mark.parametrize(("parts", "times"), [(2, 1), (3, 2)])
def test_a_range_is_broadcast_where_half_of_the_ranks_want_it(parts, times):
    ranks = 2 * parts
    models, whole = [_Model(2) for _ in range(ranks)], _Model(1)
    all_ranks(ranks, _load_on(models, parts))
    for rank, model in enumerate(models):
        mine, wanted = (each.matrix.detach().reshape(parts, -1)[rank % parts] for each in (model, whole))
        assert torch.equal(mine, wanted)
        assert torch.equal(model.bias, whole.bias)
    assert _total(_given()) == 4 * (times * whole.matrix.numel() + whole.bias.numel() + 100)


@pytest.mark.slow
def test_what_fails_on_the_rank_that_reads_is_raised_on_every_rank():
    request = 0
    while True:
        FailingStore.fail_at(request, "before")
        models = [_Model(2), _Model(2)]
        answers = on_ranks(2, _load_on(models))
        if FailingStore.failed is None:
            break
        assert all(isinstance(answer, CheckpointError) for answer in answers), answers
        for model in models:
            assert all(map(torch.equal, model.parameters(), _Model(2).parameters()))
        request += 1
    assert request > 10


def test_an_index_that_is_wrong_about_what_one_rank_reads_is_refused_on_all():
    """Rank 0 and rank 1 read halves of the matrix, in a file each; the bias is where one of the halves is."""

    def save_on(coordinator):
        state = _state(_Model(1), coordinator, 2)
        ShardedCheckpointIO().save(URL, state, {}, coordinator=coordinator, information={})

    FailingStore.store.clear()
    all_ranks(2, save_on)
    store = FailingStore()
    manifest = json.loads(store.cat_file(f"{URL}/manifest.json"))
    index = f"{URL}/{manifest['index']['path']}"
    columns = {name: column.copy() for name, column in safetensors.numpy.load(store.cat_file(index)).items()}
    bias, *halves = zip(columns["file"].tolist(), columns["begin"].tolist(), strict=True)
    columns["begin"][0] = next(begin for file, begin in halves if file == bias[0])
    raw = safetensors.numpy.save(columns)
    store.pipe_file(index, raw)
    del manifest["digest"]
    manifest["index"] |= {"bytes": len(raw), "digest": xxhash.xxh3_64_hexdigest(raw)}
    body = json.dumps(manifest)[:-1].encode()
    store.pipe_file(f"{URL}/manifest.json", body + b', "digest": "%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode())
    FailingStore.given.clear()
    for error in on_ranks(2, _load_on([_Model(2), _Model(3)], parts=2)):
        assert f"rank {bias[0]}: the index of chunks gives some bytes of a file to two chunks" in str(error)
    assert not _given()
