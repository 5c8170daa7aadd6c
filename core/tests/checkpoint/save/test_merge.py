"""What ranks wrote becomes one index: compared with theirs, chunk by chunk."""

from __future__ import annotations

import dataclasses
import random

import pytest

from shard_core.checkpoint.format.box import Box, boxes_of_range
from shard_core.checkpoint.format.chunk_index import BLOCK_BYTES, Chunk, ChunkIndex, TensorRecord
from shard_core.checkpoint.save.merge import merge_rank_indexes
from shard_core.checkpoint.save.rank_index import RankIndex, decode_rank_index, encode_rank_index, index_of
from shard_core.checkpoint.storage.interface import FileRecord
from shard_core.errors import CheckpointError

_ATTEMPT = "0123456789ab"
_SHAPES = [(), (0,), (7,), (5, 3), (5, 3), (2, 3, 4), (3 * BLOCK_BYTES,)]


def _encoded(index: ChunkIndex) -> RankIndex:
    return decode_rank_index(encode_rank_index(_ATTEMPT, index), _ATTEMPT)


def _written(rank: int, world_size: int, choose: random.Random) -> ChunkIndex:
    """Build a rank's index of one of as many flat ranges of each tensor, split anywhere, in two files."""
    tensors = [TensorRecord(key=f"model.{n}", dtype="I8", shape=shape) for n, shape in enumerate(_SHAPES)]
    chunks: dict[str, list[Chunk]] = {}
    ends = [8, 8]
    for tensor in tensors:
        places = random.Random(tensor.key)
        bounds = sorted([0, tensor.bytes, *(places.randint(0, tensor.bytes) for _ in range(world_size - 1))])
        for box in boxes_of_range(tensor.shape, bounds[rank], bounds[rank + 1]):
            file = choose.randrange(2)
            digests = [choose.getrandbits(64) for _ in range(-(-box.volume // BLOCK_BYTES))]
            chunks.setdefault(tensor.key, []).append(Chunk(file=file, begin=ends[file], box=box, digests=digests))
            ends[file] += box.volume
    named = [tensor for tensor in tensors if tensor.key in chunks or choose.random() < 0.5]
    files = [
        FileRecord(path=f"{kind}-{rank:05d}-of-{world_size:05d}.safetensors", bytes=end, digest="0" * 16)
        for kind, end in zip(("model", "optim"), ends, strict=True)
    ]
    return index_of(named, files, chunks)


@pytest.mark.parametrize("world_size", [1, 2, 3, 17])
def test_every_ranks_chunks_are_in_the_index_in_the_order_of_ranks(world_size: int):
    choose = random.Random(world_size)
    indexes = [_written(rank, world_size, choose) for rank in range(world_size)]
    merged = merge_rank_indexes(map(_encoded, indexes))
    merged.check_tiling()
    merged.check_places()
    assert merged.files == tuple(file for index in indexes for file in index.files)
    assert len(merged) == sum(map(len, indexes))
    for tensor in merged.tensors:
        expected = [
            dataclasses.replace(chunk, file=chunk.file + 2 * rank)
            for rank, index in enumerate(indexes)
            if tensor.key in index
            for chunk in index.chunks(tensor.key)
        ]
        assert list(merged.chunks(tensor.key)) == expected
    for number in range(2 * world_size):
        in_file = [chunk for _, chunk in merged.in_file(number)]
        assert [chunk.begin for chunk in in_file] == sorted(chunk.begin for chunk in in_file)
        assert 8 + sum(chunk.box.volume for chunk in in_file) == merged.files[number].bytes
    again = ChunkIndex.from_bytes(merged.to_bytes(), merged.tensors, merged.files)
    assert all(list(again.chunks(t.key)) == list(merged.chunks(t.key)) for t in merged.tensors)


def test_tensors_cut_alike_share_one_description():
    def rank_of(rank: int) -> RankIndex:
        tensors = [TensorRecord(key=f"optim.{n}", dtype="F32", shape=(8, n % 2 + 1)) for n in range(100)]
        chunks = {
            tensor.key: [
                Chunk(file=0, begin=32 * n, box=Box((4 * rank, 0), (4, tensor.shape[1])), digests=[n]),
            ]
            for n, tensor in enumerate(tensors)
        }
        return _encoded(
            index_of(
                tensors,
                [FileRecord(path=f"optim-{rank:05d}-of-00002.safetensors", bytes=3200, digest="0" * 16)],
                chunks,
            )
        )

    merged = merge_rank_indexes(rank_of(rank) for rank in range(2))
    merged.check_tiling()
    merged.check_places()
    assert len(merged) == 200
    assert len(merged.columns["offsets"]) == 2 * 2 * 2


def test_ranks_that_disagree_about_a_tensor_are_refused():
    def rank_of(shape: tuple[int, ...]) -> RankIndex:
        tensor = TensorRecord(key="model.w", dtype="F32", shape=shape)
        return _encoded(index_of([tensor], [], {}))

    with pytest.raises(CheckpointError, match=r"rank 2 holds 'model\.w' as F32 of shape \(3,\), another rank as F32"):
        merge_rank_indexes([rank_of((2,)), rank_of((2,)), rank_of((3,))])


def test_no_rank_wrote_a_tensor():
    assert len(merge_rank_indexes([_encoded(index_of([], [], {}))])) == 0
