"""The ``.metadata`` of torch's distributed checkpoints, which is a pickle, read without executing anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shard_core._versions import METADATA_CLASSES, METADATA_LAYOUT, METADATA_SIZE
from shard_core.checkpoint.format.box import Box
from shard_core.checkpoint.format.tiling import tiling_flaw
from shard_core.checkpoint.interop.inert_pickle import Record, load_inert
from shard_core.checkpoint.interop.safetensors_files import check_inside
from shard_core.checkpoint.interop.weights import Layout
from shard_core.errors import CheckpointCorrupted

if TYPE_CHECKING:
    from shard_core.checkpoint.interop.nesting import Place

_MOST_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """One box of one tensor in one file.

    Attributes:
        box: Which box of the tensor it is.
        file: The file's name in the folder.
        begin: Where in the file it begins.
        length: How many bytes it takes.
    """

    box: Box
    file: str
    begin: int
    length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DCPMetadata:
    """What is in a folder of ``torch.distributed.checkpoint``.

    Attributes:
        entries: Tensors, and in words what is none, by the keys that lead to them.
        chunks: The chunks of each tensor, by the same keys; they tile it.
    """

    entries: Mapping[Place, Layout | str]
    chunks: Mapping[Place, tuple[Chunk, ...]]


def read_metadata(path: Path) -> DCPMetadata:
    """Read the file of metadata of a folder.

    Raises:
        CheckpointCorrupted: If it names anything but what such metadata consist of, or contradicts itself.
    """
    with path.open("rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    owner = repr(str(path))
    if len(raw) > _MOST_BYTES:
        raise CheckpointCorrupted(f"{owner} is longer than any metadata.")
    content = load_inert(raw, owner, METADATA_CLASSES, _values())
    try:
        return _Decoder(owner, _state(content, "Metadata")).decode()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorrupted(f"{owner} is not laid out as torch does: {type(error).__name__}: {error}.") from error


def _values() -> dict[tuple[str, str], Any]:
    """Return what stands for a size, a layout, a dtype."""
    dtypes = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return {**dtypes, METADATA_SIZE: tuple, METADATA_LAYOUT: str}


class _Decoder:
    """Decodes the records of one metadata file; what is not as it must be raises what Python raises then."""

    def __init__(self, owner: str, metadata: Mapping[str, Any]) -> None:
        self._owner = owner
        self._stored = dict(metadata["state_dict_metadata"])
        self._places = {name: _place(path) for name, path in (metadata.get("planner_data") or {}).items()}
        self._bytes = dict(self._locations(metadata["storage_data"]))

    def decode(self) -> DCPMetadata:
        entries: dict[Place, Layout | str] = {}
        chunks: dict[Place, tuple[Chunk, ...]] = {}
        for name, record in self._stored.items():
            place = self._places.get(name, (_text(name),))
            if isinstance(record, Record) and record.kind == "BytesStorageMetadata":
                entries[place] = "a pickled value"
                continue
            state = _state(record, "TensorStorageMetadata")
            layout = Layout(_dtype(state["properties"]), _integers(state["size"]))
            chunks[place] = tuple(self._chunk(name, _state(each, "ChunkStorageMetadata")) for each in state["chunks"])
            entries[place] = layout
            self._check_tiling(name, layout, chunks[place])
        return DCPMetadata(entries=entries, chunks=chunks)

    def _locations(self, storage: Mapping[Record, Record]) -> Iterator[tuple[tuple[str, tuple[int, ...]], Any]]:
        for index, info in storage.items():
            of = _state(index, "MetadataIndex")
            if of.get("offset") is not None:
                yield (_text(of["fqn"]), _integers(of["offset"])), _state(info, "_StorageInfo")

    def _chunk(self, name: str, state: Mapping[str, Any]) -> Chunk:
        box = Box(_integers(state["offsets"]), _integers(state["sizes"]))
        where = self._bytes.get((name, box.offsets))
        if where is None:
            raise CheckpointCorrupted(f"{self._owner} does not say where the part of {name!r} at {box.offsets} is.")
        if where.get("transform_descriptors"):
            raise CheckpointCorrupted(
                f"{self._owner} says that {name!r} was written through {where['transform_descriptors']!r}, which "
                "cannot be read here; save it without extensions."
            )
        file = _text(where["relative_path"])
        check_inside(file, f"{self._owner} says that {name!r}")
        begin, length = _integers((where["offset"], where["length"]))
        return Chunk(box=box, file=file, begin=begin, length=length)

    def _check_tiling(self, name: str, layout: Layout, chunks: tuple[Chunk, ...]) -> None:
        dims = len(layout.shape)
        extents = [
            np.array([*each], dtype=np.int64).reshape(len(chunks), dims)
            for each in (
                [chunk.box.offsets for chunk in chunks],
                [chunk.box.sizes for chunk in chunks],
            )
        ]
        flaw = tiling_flaw(layout.shape, *extents)
        if flaw:
            raise CheckpointCorrupted(f"{self._owner}: {name!r} is not covered exactly once: {flaw}.")


def _state(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, Record) or value.kind != kind:
        raise TypeError(f"a {kind} was expected, not {value!r:.80}")
    return dict(value.state or {})


def _dtype(properties: Any) -> torch.dtype:
    if not isinstance(properties, Record) or properties.kind != "TensorProperties":
        raise TypeError(f"TensorProperties were expected, not {properties!r:.80}")
    dtype = properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a dtype was expected, not {dtype!r:.80}")
    return dtype


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a string was expected, not {value!r:.80}")
    return value


def _integers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or any(type(each) is not int or not 0 <= each < 2**63 for each in values):
        raise TypeError(f"integers were expected, not {values!r:.80}")
    return values


def _place(path: Any) -> Place:
    if not isinstance(path, tuple) or not path or any(not isinstance(each, str | int) for each in path):
        raise TypeError(f"keys were expected, not {path!r:.80}")
    return tuple(map(str, path))
