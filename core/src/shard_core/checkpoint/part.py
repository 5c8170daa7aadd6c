"""What one rank wrote, as a record that the rank which commits can read quickly."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import safetensors.numpy

from shard_core.checkpoint.fields import Fields
from shard_core.checkpoint.index import COLUMNS, Chunk, ChunkIndex, Columns, TensorRecord, decode_columns, starts
from shard_core.checkpoint.manifest import read_file, read_tensor
from shard_core.errors import CheckpointCorrupted, CheckpointError

if TYPE_CHECKING:
    from shard_core.checkpoint.storage.record import FileRecord

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
    tensors = zlib.compress(_json({tensor.key: [tensor.dtype, *tensor.shape] for tensor in index.tensors}), level=1)
    about = _json({"attempt": attempt, "files": [dataclasses.asdict(file) for file in index.files]})
    texts = {name: np.frombuffer(text, dtype=np.uint8) for name, text in ((_TENSORS, tensors), (_ABOUT, about))}
    return safetensors.numpy.save({**index.columns, "digest_counts": index.digest_counts.astype(np.int32), **texts})


def decode_part(raw: bytes, attempt: str) -> Part:
    """Decode what ``encode_part`` encoded.

    Raises:
        CheckpointError: If it is part of another save.
        CheckpointCorrupted: If it is no such record.
    """
    columns = decode_columns(raw, {**COLUMNS, "digest_counts": "i4", _TENSORS: "u1", _ABOUT: "u1"})
    about = Fields.from_json(columns.pop(_ABOUT).tobytes(), "a part record")
    if about.text("attempt") != attempt:
        raise CheckpointError(f"a part record belongs to save {about.text('attempt')}, not to {attempt}.")
    files = [read_file(file) for file in about.listed("files")]
    return Part(tensors=columns.pop(_TENSORS).tobytes(), files=files, columns=columns)


def decode_tensors(raw: bytes) -> tuple[TensorRecord, ...]:
    """Decode the full tensors of a part, sorted by key.

    Raises:
        CheckpointCorrupted: If they are none.
    """
    try:
        text = zlib.decompress(raw)
    except zlib.error as error:
        raise CheckpointCorrupted(f"the tensors of a part record cannot be unpacked: {error}.") from error
    fields = Fields.from_json(b'{"tensors":%s}' % text, "a part record")
    return tuple(read_tensor(key, value) for key, value in fields.mapping("tensors").items())


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
