"""What one rank wrote, as a record that the rank which commits can read quickly."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import safetensors.numpy

from shard_core.checkpoint.index import COLUMNS, Chunk, ChunkIndex, Columns, TensorRecord, decode_columns, starts
from shard_core.checkpoint.tensor_file import FileRecord
from shard_core.errors import CheckpointError

#: The columns of a part record besides those of its index.
_TENSORS, _ABOUT = "tensors", "about"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part record, decoded no further than it takes to join it with others.

    Attributes:
        tensors: The full tensors, encoded; the same on nearly all ranks, so that decoding once will do.
        files: What the rank wrote.
        columns: As in an index, and ``digest_counts``, how many digests each tensor has.
    """

    tensors: bytes
    files: Sequence[FileRecord]
    columns: Columns


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
    by_tensor = [chunks.get(tensor.key, ()) for tensor in tensors]
    cuts = [(tensor.shape, tuple(chunk.box for chunk in each)) for tensor, each in zip(tensors, by_tensor, strict=True)]
    numbers = {cut: number for number, cut in enumerate(dict.fromkeys(cuts))}
    boxes = [box for _, each in numbers for box in each]
    listed = [chunk for each in by_tensor for chunk in each]
    columns = {
        "cut": [numbers[cut] for cut in cuts],
        "rows": starts([len(each) for _, each in numbers]),
        "offsets": [offset for box in boxes for offset in box.offsets],
        "sizes": [size for box in boxes for size in box.sizes],
        "file": [chunk.file for chunk in listed],
        "begin": [chunk.begin for chunk in listed],
        "digests": [digest for chunk in listed for digest in chunk.digests],
    }
    return ChunkIndex(tensors, files, {name: np.asarray(columns[name], dtype=kind) for name, kind in COLUMNS.items()})


def encode_part(attempt: str, index: ChunkIndex) -> bytes:
    """Encode an index with its tensors and files, for the rank that commits.

    Args:
        attempt: The save it is part of.
        index: What this rank wrote.
    """
    # Every rank tells of every tensor. Packed, and compared before it is unpacked, that stays cheap for
    # thousands of ranks.
    tensors = zlib.compress(_json([dataclasses.asdict(tensor) for tensor in index.tensors]), level=1)
    about = _json({"attempt": attempt, "files": [dataclasses.asdict(file) for file in index.files]})
    texts = {name: np.frombuffer(text, dtype=np.uint8) for name, text in ((_TENSORS, tensors), (_ABOUT, about))}
    return safetensors.numpy.save({**index.columns, "digest_counts": index.digest_counts.astype(np.int32), **texts})


def decode_part(raw: bytes, attempt: str) -> Part:
    """Decode what ``encode_part`` encoded.

    Raises:
        CheckpointError: If it is part of another save.
    """
    columns = decode_columns(raw, {**COLUMNS, "digest_counts": "i4", _TENSORS: "u1", _ABOUT: "u1"})
    tensors, about = columns.pop(_TENSORS).tobytes(), json.loads(columns.pop(_ABOUT).tobytes())
    if about["attempt"] != attempt:
        raise CheckpointError(f"a part record belongs to save {about['attempt']}, not to {attempt}.")
    return Part(tensors=tensors, files=[FileRecord(**file) for file in about["files"]], columns=columns)


def decode_tensors(raw: bytes) -> tuple[TensorRecord, ...]:
    """Decode the full tensors of a part, sorted by key."""
    listed = json.loads(zlib.decompress(raw))
    return tuple(TensorRecord(key=each["key"], dtype=each["dtype"], shape=tuple(each["shape"])) for each in listed)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
