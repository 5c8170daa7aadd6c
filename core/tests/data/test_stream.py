from __future__ import annotations

import pytest
import torch.distributed as dist
from loaders import Stream, all_of, read, sharded
from torch.utils.data import DataLoader, IterableDataset

from shard_core.errors import CheckpointError, CheckpointMismatch


class StreamWithState(IterableDataset):
    def __init__(self):
        self.position = 100 * dist.get_rank() if dist.is_initialized() else 0

    def __iter__(self):
        for _ in range(8):
            self.position += 1
            yield self.position - 1

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def _stream_loader(**options):
    return DataLoader(Stream(), batch_size=2, **options)


def test_a_stream_passes_as_it_is(worlds):
    assert worlds(2).run(_stream) == [list(range(6)), list(range(100, 106))]


def _stream():
    return all_of(sharded(_stream_loader()))


def test_a_stream_without_state_says_that_its_position_is_unknown():
    loader = sharded(_stream_loader())
    with pytest.raises(CheckpointError, match="position of Stream is unknown"):
        loader.state_dict()
    ahead = sharded(DataLoader(StreamWithState(), 2, num_workers=1))
    with pytest.raises(CheckpointError, match="position of StreamWithState is unknown"):
        ahead.state_dict()


def _stateful_stream():
    return DataLoader(StreamWithState(), batch_size=2)


def test_a_stream_with_state_resumes_rank_by_rank(worlds):
    results = worlds(2).run(read, _stateful_stream, {}, {}, None, 2)
    assert [batches for batches, _ in results] == [[[0, 1], [2, 3]], [[100, 101], [102, 103]]]
    resumed = worlds(2).run(read, _stateful_stream, {}, {}, results[0][1], 1)
    assert [batches for batches, _ in resumed] == [[[4, 5]], [[104, 105]]]
    with pytest.raises(CheckpointMismatch, match="saved by 2 ranks and cannot be divided among 1"):
        read(_stateful_stream, {}, {}, results[0][1])
