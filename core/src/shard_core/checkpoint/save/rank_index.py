"""Rank indexes: what each rank wrote, encoded so that the rank which commits can merge thousands (see ``merge``)."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from shard_core.checkpoint.format.chunk_index import COLUMNS, Chunk, ChunkIndex, Columns, TensorRecord, decode_columns
from shard_core.checkpoint.format.json_fields import Fields
from shard_core.checkpoint.format.manifest import read_file, read_tensor
from shard_core.checkpoint.format.ragged import starts
from shard_core.errors import CheckpointCorrupted, CheckpointError

if TYPE_CHECKING:
    from shard_core.checkpoint.format.box import Integers
    from shard_core.checkpoint.storage.interface import FileRecord

_LAYOUT, _TENSORS, _ABOUT = "layout", "tensors", "about"
#: The columns of an index that differ from rank to rank; the others are the layout, which many ranks have in common.
_OWN = {name: COLUMNS[name] for name in ("offsets", "digests")}
_OF_LAYOUT = {name: kind for name, kind in COLUMNS.items() if name not in _OWN} | {
    "digest_counts": "i4",
    _TENSORS: "u1",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankIndex:
    """What one rank wrote, decoded no further than it takes to merge it with others.

    Attributes:
        layout: What ``decode_layout`` decodes; the same on many ranks, so that decoding once will do.
        files: What the rank wrote.
        offsets: As in an index.
        digests: As in an index.
    """

    layout: bytes
    files: Sequence[FileRecord]
    offsets: Integers
    digests: npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """What the indexes of many ranks have in common.

    Attributes:
        tensors: The full tensors, sorted by key.
        columns: As in an index, but for those of each rank, and ``digest_counts``, how many digests each tensor has.
    """

    tensors: tuple[TensorRecord, ...]
    columns: Columns


def index_of(
    tensors: Iterable[TensorRecord], files: Sequence[FileRecord], chunks: Mapping[str, Sequence[Chunk]]
) -> ChunkIndex:
    """Build the index of chunks that one process wrote.

    Args:
        tensors: The full tensors it has chunks of.
        files: The files it wrote.
        chunks: What is in them, by the tensors' keys.
    """
    tensors = sorted(tensors, key=lambda tensor: tensor.key)
    by_tensor = [chunks.get(tensor.key, ()) for tensor in tensors]
    tilings = [(of.shape, tuple(chunk.box for chunk in each)) for of, each in zip(tensors, by_tensor, strict=True)]
    numbers = {tiling: number for number, tiling in enumerate(dict.fromkeys(tilings))}
    boxes = [box for _, each in numbers for box in each]
    listed = [chunk for each in by_tensor for chunk in each]
    columns = {
        "cut": [numbers[tiling] for tiling in tilings],
        "rows": starts([len(each) for _, each in numbers]),
        "offsets": [offset for box in boxes for offset in box.offsets],
        "sizes": [size for box in boxes for size in box.sizes],
        "file": [chunk.file for chunk in listed],
        "begin": [chunk.begin for chunk in listed],
        "digests": [digest for chunk in listed for digest in chunk.digests],
    }
    return ChunkIndex(tensors, files, {name: np.asarray(columns[name], dtype=kind) for name, kind in COLUMNS.items()})


def encode_rank_index(attempt: str, index: ChunkIndex) -> bytes:
    """Encode an index with its tensors and files, for the rank that commits.

    Args:
        attempt: The save it is part of.
        index: What this rank wrote.
    """
    tensors = _json({_TENSORS: {tensor.key: [tensor.dtype, *tensor.shape] for tensor in index.tensors}})
    described = {**index.columns, "digest_counts": index.digest_counts.astype(np.int32), _TENSORS: _bytes(tensors)}
    layout = safetensors.numpy.save({name: described[name] for name in _OF_LAYOUT})
    about = _json({"attempt": attempt, "files": [dataclasses.asdict(file) for file in index.files]})
    # Every rank describes every tensor. Packed, and compared before it is unpacked, that stays cheap for
    # thousands of ranks.
    packed = {_LAYOUT: _bytes(zlib.compress(layout, level=1)), _ABOUT: _bytes(about)}
    return safetensors.numpy.save({**{name: index.columns[name] for name in _OWN}, **packed})


def decode_rank_index(raw: bytes, attempt: str) -> RankIndex:
    """Decode what ``encode_rank_index`` encoded.

    Raises:
        CheckpointError: If it is part of another save.
        CheckpointCorrupted: If it is no such record.
    """
    columns = decode_columns(raw, {**_OWN, _LAYOUT: "u1", _ABOUT: "u1"})
    about = Fields.from_json(columns[_ABOUT].tobytes(), "a rank index")
    if about.text("attempt") != attempt:
        raise CheckpointError(f"a rank index belongs to save {about.text('attempt')}, not to {attempt}.")
    files = [read_file(file) for file in about.listed("files")]
    own = {name: columns[name] for name in _OWN}
    return RankIndex(layout=columns[_LAYOUT].tobytes(), files=files, **own)


def decode_layout(raw: bytes) -> Layout:
    """Decode the layout of a rank index.

    Raises:
        CheckpointCorrupted: If it is none.
    """
    try:
        columns = decode_columns(zlib.decompress(raw), _OF_LAYOUT)
    except zlib.error as error:
        raise CheckpointCorrupted(f"the layout of a rank index cannot be unpacked: {error}.") from error
    fields = Fields.from_json(columns.pop(_TENSORS).tobytes(), "the layout of a rank index")
    listed = fields.mapping(_TENSORS)
    return Layout(tensors=tuple(read_tensor(key, value) for key, value in listed.items()), columns=columns)


def _bytes(text: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text, dtype=np.uint8)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
