"""The manifest: the one JSON file that makes a folder a checkpoint, written last and trusted least."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import xxhash

from shard_core.checkpoint.format.chunk_index import TensorRecord
from shard_core.checkpoint.format.dtypes import ITEM_SIZES
from shard_core.checkpoint.format.json_fields import Fields, shown
from shard_core.checkpoint.storage.interface import FileRecord
from shard_core.errors import CheckpointCorrupted

MANIFEST_NAME = "manifest.json"
#: The save that has claimed this file may use plain names for all its files.
CLAIM = "index.safetensors"
FORMAT = "shard-checkpoint"
VERSION = 1
#: Every name that a file of a save may have; nothing else is read, and nothing else is ever removed.
FILE_NAME = re.compile(
    r"(?:(?:model|optim|state|part)-\d{5,}-of-\d{5,}|checkpoint|index)(?:-[0-9a-f]{12})?\.safetensors"
)

#: The sequence is in so many first bytes of what ``to_bytes`` writes.
HEAD_BYTES = 256

_HEAD = re.compile(
    rb'\{"format": "[a-z-]+", "version": \d+, "attempt": "[0-9a-f]{12}", "created": \d+, "sequence": (\d{1,18}), '
)
_MOST_DIMS = 64
_SEAL = re.compile(rb'(\{.*), "digest": "([0-9a-f]{32})"\}\n', re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that is known of a checkpoint but its tensors' elements.

    Attributes:
        attempt: The save that wrote it; no two saves share it.
        created: When it was committed, in nanoseconds since 1970, by rank 0's clock, for people.
        sequence: One more than the highest of the checkpoints beside it when it was committed; the order of a run's
            checkpoints. 0 in those that are older than this field.
        form: ``"sharded"`` or ``"full"``.
        world_size: How many ranks wrote it.
        index: The file that holds the index of chunks; its digest is that of all its bytes.
        files: The files that hold tensors.
        tensors: The full tensors, sorted by key.
        modules: What the modules' keys begin with, by the user's names for them.
        aliases: Further keys of tied tensors, and the keys they are stored under.
        optimizers: The optimizers without their tensors, as ``OptimizerRecord.to_json`` returns them, by
            the user's names for them.
        values: The rest of the user's state, as ``values.encode`` returns it.
        information: What people may want to know of the run that saved it; never acted upon.
    """

    attempt: str
    created: int
    sequence: int
    form: str
    world_size: int
    index: FileRecord
    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]
    modules: Mapping[str, str]
    aliases: Mapping[str, str]
    optimizers: Mapping[str, Any]
    values: Mapping[str, Any]
    information: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        """Encode it, sealed with the digest of all that stands before the digest."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "index": dataclasses.asdict(self.index),
            "files": [dataclasses.asdict(file) for file in self.files],
            "tensors": {tensor.key: [tensor.dtype, *tensor.shape] for tensor in self.tensors},
        }
        body = json.dumps(content, allow_nan=False)[:-1].encode()
        return body + f', "digest": "{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Manifest:
        """Decode a manifest, believing nothing in it.

        Raises:
            CheckpointCorrupted: If any byte is not as it was written, or the content is not a manifest's.
        """
        sealed = _SEAL.fullmatch(raw)
        if sealed is None or xxhash.xxh3_128_hexdigest(sealed[1]) != sealed[2].decode():
            raise CheckpointCorrupted(
                "the manifest is damaged or was edited: it does not match its digest; use another checkpoint."
            )
        return _read(Fields.from_json(raw, "the manifest"))

    @property
    def names(self) -> list[str]:
        """All files it names."""
        return [file.path for file in (*self.files, self.index)]

    @property
    def step(self) -> int | None:
        """The value that was saved as ``step``, if it is a whole number."""
        step: Any = self.values.get("step")
        return step if type(step) is int else None

    @property
    def order(self) -> tuple[int, int, int]:
        """What a run's checkpoints are sorted by, the oldest first; clocks that go wrong change nothing in it.

        Only checkpoints without a sequence among themselves are sorted by when they were committed. Two runs that save
        at once may take the same number.
        """
        return self.sequence, 0 if self.sequence else self.created, -1 if self.step is None else self.step

    @property
    def tensor_bytes(self) -> int:
        """How much room all tensors take."""
        return sum(tensor.bytes for tensor in self.tensors)


def sequence_in(head: bytes) -> int:
    """Return the sequence in the first bytes of a manifest, the rest of which may be damaged; 0 if there is none."""
    found = _HEAD.match(head)
    return int(found[1]) if found else 0


def _read(fields: Fields) -> Manifest:
    fields.text("format", re.compile(FORMAT))
    if fields.integer("version") != VERSION:
        raise CheckpointCorrupted(
            f"the checkpoint is of format version {fields.integer('version')}, this shard-core reads {VERSION}; "
            "install the shard-core that wrote it, or a newer one."
        )
    files = tuple(read_file(file) for file in fields.listed("files"))
    tensors = tuple(read_tensor(key, value) for key, value in fields.mapping("tensors").items())
    manifest = Manifest(
        attempt=fields.text("attempt", re.compile("[0-9a-f]{12}")),
        created=fields.integer("created"),
        sequence=fields.integer("sequence") if "sequence" in fields else 0,
        form=fields.text("form", re.compile("sharded|full")),
        world_size=fields.integer("world_size", least=1),
        index=read_file(fields.object("index")),
        files=files,
        tensors=tensors,
        modules=fields.texts("modules"),
        aliases=fields.texts("aliases"),
        optimizers=fields.mapping("optimizers"),
        values=fields.mapping("values"),
        information=fields.mapping("information"),
    )
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    if len(set(manifest.names)) < len(manifest.names):
        raise CheckpointCorrupted("the manifest names a file twice.")
    held = sum(file.bytes for file in manifest.files)
    if manifest.tensor_bytes > held or held >= 2**63:
        raise CheckpointCorrupted("the manifest names tensors or files larger than they can be.")
    keys = {tensor.key for tensor in manifest.tensors}
    for alias, key in manifest.aliases.items():
        if key not in keys or alias in keys:
            raise CheckpointCorrupted(f"the manifest ties {shown(alias)} to {shown(key)}, which cannot be.")


def read_file(fields: Fields) -> FileRecord:
    """Decode the record of a file.

    Raises:
        CheckpointCorrupted: If no save writes a file of such a name, or one of the fields is not as it must be.
    """
    return FileRecord(
        path=fields.text("path", FILE_NAME),
        bytes=fields.integer("bytes", least=8),
        digest=fields.text("digest", re.compile("[0-9a-f]{16}")),
    )


def read_tensor(key: str, value: Any) -> TensorRecord:
    """Decode the record of a tensor.

    Raises:
        CheckpointCorrupted: If the value is no list of dtype and sizes.
    """
    items: list[Any] = value if isinstance(value, list) and value else [None]
    code, shape = items[0], items[1:]
    is_known = isinstance(code, str) and code in ITEM_SIZES
    if not is_known or len(shape) > _MOST_DIMS or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise CheckpointCorrupted(f"{shown(key)} is described as no tensor can be.")
    return TensorRecord(key=key, dtype=code, shape=tuple(shape))
