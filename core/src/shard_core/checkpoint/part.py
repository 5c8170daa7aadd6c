"""What one rank wrote, and how the parts of all ranks become one index."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import safetensors.numpy

from shard_core.checkpoint.index import (
    COLUMNS,
    Chunk,
    ChunkIndex,
    Columns,
    TensorRecord,
    decode_columns,
    starts,
)
from shard_core.checkpoint.tensor_file import FileRecord
from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    from shard_core.checkpoint.box import Integers


def index_of(
    tensors: Iterable[TensorRecord], files: Sequence[FileRecord], chunks: Mapping[str, Sequence[Chunk]]
) -> ChunkIndex:
    """Build the index of chunks that one process wrote.

    Args:
        tensors: The full tensors it has parts of.
        files: The files it wrote.
        chunks: What is in them, by the tensors' keys.
    """
    tensors = sorted(tensors, key=lambda tensor: tensor.key)
    listed = [chunk for tensor in tensors for chunk in chunks.get(tensor.key, ())]
    columns = {
        "rows": starts([len(chunks.get(tensor.key, ())) for tensor in tensors]),
        "file": [chunk.file for chunk in listed],
        "begin": [chunk.begin for chunk in listed],
        "offsets": [offset for chunk in listed for offset in chunk.box.offsets],
        "sizes": [size for chunk in listed for size in chunk.box.sizes],
        "digests": [digest for chunk in listed for digest in chunk.digests],
    }
    return ChunkIndex(tensors, files, {name: np.asarray(columns[name], dtype=kind) for name, kind in COLUMNS.items()})


def encode_part(attempt: str, index: ChunkIndex) -> bytes:
    """Encode an index with its tensors and files, for the rank that commits.

    Args:
        attempt: The save it is part of.
        index: What this rank wrote.
    """
    about = {
        "attempt": attempt,
        "tensors": [dataclasses.asdict(tensor) for tensor in index.tensors],
        "files": [dataclasses.asdict(file) for file in index.files],
    }
    text = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
    return safetensors.numpy.save({**index.columns, "about": text})


def decode_part(raw: bytes, attempt: str) -> ChunkIndex:
    """Decode what ``encode_part`` encoded.

    Raises:
        CheckpointError: If it is part of another save.
    """
    columns = decode_columns(raw, {**COLUMNS, "about": "u1"})
    about = json.loads(columns.pop("about").tobytes())
    if about["attempt"] != attempt:
        raise CheckpointError(f"a part record belongs to save {about['attempt']}, not to {attempt}.")
    tensors = [TensorRecord(key=t["key"], dtype=t["dtype"], shape=tuple(t["shape"])) for t in about["tensors"]]
    return ChunkIndex(tensors, [FileRecord(**file) for file in about["files"]], columns)


def merge_parts(parts: Sequence[ChunkIndex]) -> ChunkIndex:
    """Join what all ranks wrote into one index.

    Args:
        parts: Each rank's, in rank order.

    Raises:
        CheckpointError: If two ranks disagree about a tensor's dtype or shape.
    """
    tensors = _agreed_tensors(parts)
    position = {tensor.key: place for place, tensor in enumerate(tensors)}
    joined: Columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in COLUMNS}
    first_file = starts([len(part.files) for part in parts])[:-1]
    file = joined["file"] + np.repeat(first_file, [len(part) for part in parts])
    owner = np.concatenate([np.repeat([position[t.key] for t in part.tensors], part.counts) for part in parts]).astype(
        "i8"
    )
    order = np.lexsort((joined["begin"], file, owner))
    dims = np.array([len(tensor.shape) for tensor in tensors], dtype=np.int64)[owner]
    extents = _ragged_order(dims, order)
    columns = {
        "rows": starts(np.bincount(owner, minlength=len(tensors))),
        "file": file[order].astype("i4"),
        "begin": joined["begin"][order],
        "offsets": joined["offsets"][extents],
        "sizes": joined["sizes"][extents],
        "digests": joined["digests"][_ragged_order(np.concatenate([part.blocks for part in parts]), order)],
    }
    return ChunkIndex(tensors, [file for part in parts for file in part.files], columns)


def _agreed_tensors(parts: Sequence[ChunkIndex]) -> list[TensorRecord]:
    records: dict[str, TensorRecord] = {}
    for rank, part in enumerate(parts):
        for tensor in part.tensors:
            known = records.setdefault(tensor.key, tensor)
            if known != tensor:
                raise CheckpointError(
                    f"rank {rank} holds {tensor.key!r} as {tensor.dtype} of shape {tensor.shape}, another rank as "
                    f"{known.dtype} of shape {known.shape}; every rank must hold parts of the same model."
                )
    return [records[key] for key in sorted(records)]


def _ragged_order(lengths: Integers, order: Integers) -> Integers:
    """Tell where the elements of runs of unlike lengths stand once the runs are re-ordered."""
    taken = lengths[order]
    shift = starts(lengths)[:-1][order] - starts(taken)[:-1]
    return np.repeat(shift, taken) + np.arange(int(taken.sum()))
