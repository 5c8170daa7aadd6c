"""What each rank writes in a save: its tensors into files, and a rank index of them; rank 0 gathers the indexes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import xxhash
from torch.distributed.tensor import DTensor

from shard_core.checkpoint.format.box import Box
from shard_core.checkpoint.format.chunk_index import Chunk, ChunkIndex, TensorRecord
from shard_core.checkpoint.format.dtypes import ITEM_SIZES, dtype_code
from shard_core.checkpoint.format.reader import TensorReader
from shard_core.checkpoint.format.values import encode
from shard_core.checkpoint.keys import KINDS, VALUE
from shard_core.checkpoint.save.merge import merge_rank_indexes
from shard_core.checkpoint.save.rank_index import RankIndex, decode_rank_index, encode_rank_index, index_of
from shard_core.checkpoint.save.writer import Entry, TensorFileWriter
from shard_core.checkpoint.state.ownership import check_values
from shard_core.checkpoint.state.shard import TensorShard
from shard_core.errors import CheckpointCorrupted, CheckpointError

if TYPE_CHECKING:
    import torch

    from shard_core.checkpoint.format.values import JSON
    from shard_core.checkpoint.save.commit import Attempt
    from shard_core.checkpoint.storage.interface import FileRecord
    from shard_core.checkpoint.storage.tasks import Tasks


def value_shards(values: Mapping[str, Any], *, write: bool) -> tuple[dict[str, JSON], list[TensorShard]]:
    """Split the user's values into JSON and tensors.

    Args:
        values: By the user's names.
        write: Whether this rank saves the tensors.

    Raises:
        CheckpointError: Naming what is neither.
    """
    shards: dict[str, TensorShard] = {}

    def keep(path: str, tensor: torch.Tensor) -> JSON:
        key = f"{VALUE}{path}"
        if isinstance(tensor, DTensor):
            raise CheckpointError(
                f"{path!r} is a distributed tensor; put the module that holds it into the state, or a plain tensor."
            )
        if write:
            check_values(path, tensor)
        if key in shards:
            raise CheckpointError(f"two tensors in the state are called {path!r}; rename one.")
        shards[key] = TensorShard(
            key=key, shape=tuple(tensor.shape), offsets=(0,) * tensor.dim(), view=tensor.detach(), write=write
        )
        return {"$tensor": key}

    for name in values:
        if not isinstance(name, str):
            raise CheckpointError(f"the state has the key {name!r}; keys are strings.")
    return {name: encode(value, name, keep) for name, value in values.items()}, list(shards.values())


def write_rank(attempt: Attempt, rank: int, shards: Sequence[TensorShard], finishing: Tasks) -> str:
    """Write what this rank owns, and a rank index of it.

    Args:
        attempt: The save.
        rank: This rank.
        shards: All boxes on this rank; those of others' are only named in the index.
        finishing: The tasks that flush each file to the disk, while the next is being written.

    Returns:
        The digest of the rank index.

    Raises:
        CheckpointError: If a tensor cannot be held by a file.
        OSError: If the disk refuses.
    """
    tensors = {
        shard.key: TensorRecord(key=shard.key, dtype=dtype_code(shard.view.dtype, shard.key), shape=shard.shape)
        for shard in shards
    }
    files: list[FileRecord] = []
    chunks: dict[str, list[Chunk]] = {}
    for kind in KINDS:
        owned = [shard for shard in shards if shard.key.startswith(f"{kind}.") and _is_written(shard)]
        if not owned:
            continue
        # Falling element sizes keep every tensor aligned; the sort is stable, so names stay in order.
        owned.sort(key=lambda shard: -shard.view.element_size())
        entries = [Entry(name=shard.label, dtype=tensors[shard.key].dtype, shape=shard.box.sizes) for shard in owned]
        with contextlib.ExitStack() as opened:
            writer = opened.enter_context(TensorFileWriter(attempt.folder, attempt.tensor_file(kind, rank), entries))
            for shard, begin in zip(owned, writer.begins, strict=True):
                chunk = Chunk(file=len(files), begin=begin, box=shard.box, digests=writer.write(shard.view))
                chunks.setdefault(shard.key, []).append(chunk)
            files.append(writer.record)
            opened.pop_all()
            finishing.begin(writer.complete)
    index = index_of(tensors.values(), files, chunks)
    index.check_places()  # on every rank that of its own files, so that rank 0 need not look at the chunks of all
    encoded = encode_rank_index(attempt.identity, index)
    attempt.folder.write(attempt.rank_index_file(rank), encoded, durable=False)
    return xxhash.xxh3_64_hexdigest(encoded)


def gather_rank_indexes(attempt: Attempt, digests: Sequence[str]) -> ChunkIndex:
    """Read and merge the indexes of all ranks; rank 0 alone.

    Args:
        attempt: The save.
        digests: What ``write_rank`` returned on each rank.

    Raises:
        CheckpointError: If an index cannot be read here, or the boxes do not tile every tensor.
    """
    index = merge_rank_indexes(_rank_indexes(attempt, digests))
    try:
        index.check_tiling()
    except CheckpointCorrupted as error:
        raise CheckpointError(
            f"what the ranks wrote does not make up whole tensors: {error} Every rank must save the same state, and "
            "filter must answer alike on every rank."
        ) from error
    return index


def check_lengths(attempt: Attempt, index: ChunkIndex) -> None:
    """Check that the files the ranks finished have their full lengths; rank 0 alone.

    Args:
        attempt: The save.
        index: What the ranks wrote.

    Raises:
        CheckpointError: If a file has another length than its writer says.
    """
    for file, length in zip(index.files, attempt.folder.sizes([file.path for file in index.files]), strict=True):
        if length != file.bytes:
            raise CheckpointError(f"{file.path!r} has {length} bytes where its rank wrote {file.bytes}.")


def _rank_indexes(attempt: Attempt, digests: Sequence[str]) -> Iterator[RankIndex]:
    raws = attempt.folder.read_each([attempt.rank_index_file(rank) for rank in range(attempt.world_size)])
    for rank, digest in enumerate(digests):
        try:
            raw = next(raws)
            if xxhash.xxh3_64_hexdigest(raw) != digest:
                raise CheckpointCorrupted("its rank index is another one.")
        except CheckpointCorrupted as error:
            raise CheckpointError(
                f"rank 0 does not see what rank {rank} wrote into {str(attempt.folder)!r}; the folder must be one that "
                "the hosts of all ranks share."
            ) from error
        yield decode_rank_index(raw, attempt.identity)


def write_full(attempt: Attempt, index: ChunkIndex) -> ChunkIndex:
    """Stream all tensors into one file, a tensor at a time; rank 0 alone.

    Args:
        attempt: The save.
        index: Where the ranks put the tensors' boxes.

    Returns:
        The index of the one file.
    """
    tensors = sorted(index.tensors, key=lambda tensor: -ITEM_SIZES[tensor.dtype])
    reader = TensorReader(attempt.folder, index)
    chunks: dict[str, list[Chunk]] = {}
    entries = [Entry(name=tensor.key, dtype=tensor.dtype, shape=tensor.shape) for tensor in tensors]
    with TensorFileWriter(attempt.folder, attempt.single_file("checkpoint"), entries) as writer:
        for tensor, begin in zip(tensors, writer.begins, strict=True):
            digests = writer.write(reader.full(tensor.key))
            reader.release()
            chunks[tensor.key] = [Chunk(file=0, begin=begin, box=Box.whole(tensor.shape), digests=digests)]
        writer.finish()
        return index_of(tensors, [writer.record], chunks)


def _is_written(shard: TensorShard) -> bool:
    """Return whether this rank saves a box; one without elements only if the tensor has none."""
    return shard.write and (shard.view.numel() > 0 or 0 in shard.shape)
