"""Reading every byte of a checkpoint and comparing it with its digests; needs no torch and no ranks."""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from shard_core.checkpoint.format.chunk_index import BLOCK_BYTES
from shard_core.checkpoint.format.dtypes import ITEM_SIZES
from shard_core.checkpoint.format.folder import read_index, read_manifest
from shard_core.checkpoint.format.manifest import FILE_NAME, Manifest
from shard_core.checkpoint.storage.opening import open_folder
from shard_core.errors import CheckpointCorrupted, CheckpointNotFound

if TYPE_CHECKING:
    from shard_core.checkpoint.format.chunk_index import Chunk, TensorRecord
    from shard_core.checkpoint.storage.interface import FileRecord, Folder, StoredFile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage:
    """One thing that is not as it was committed.

    Attributes:
        problem: What is wrong, in one sentence.
        file: The file it is in.
        tensor: The tensor that is damaged, if only some are.
    """

    problem: str
    file: str | None = None
    tensor: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of verifying a checkpoint.

    Attributes:
        path: The checkpoint.
        tensors: How many tensors it holds.
        bytes: How many bytes they take.
        damage: All that is wrong; empty if the checkpoint is fine.
    """

    path: str
    tensors: int
    bytes: int
    damage: tuple[Damage, ...]

    @property
    def is_fine(self) -> bool:
        """Whether every byte is as it was committed."""
        return not self.damage


def verify(
    path: str | os.PathLike[str],
    progress: Callable[[int, int], None] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> Verdict:
    """Read a checkpoint as a whole, a block at a time.

    Args:
        path: The checkpoint, a path or a URL.
        progress: Called with the bytes read so far and in all.
        storage_options: For the store a URL names.

    Returns:
        The verdict; it names every damaged tensor.

    Raises:
        CheckpointNotFound: If the path is no checkpoint; the message has it if it is what is left of one.
    """
    folder = open_folder(path, storage_options)
    try:
        manifest = Manifest.from_bytes(read_manifest(folder))
        index = read_index(folder, manifest)
        index.check_places()
    except CheckpointNotFound as error:
        if any(FILE_NAME.fullmatch(each.name) for each in folder.listing()):
            raise CheckpointNotFound(f"{error} A save into it was not completed, or its manifest is lost.") from error
        raise
    except CheckpointCorrupted as error:
        return _hopeless(folder, str(error))
    damage: list[Damage] = []
    total = sum(file.bytes for file in manifest.files)
    before = 0
    for number, record in enumerate(manifest.files):
        for done in _verify_file(folder, record, index.in_file(number), damage):
            if progress:
                progress(before + done, total)
        before += record.bytes
    return Verdict(
        path=str(folder),
        tensors=len(manifest.tensors),
        bytes=manifest.tensor_bytes,
        damage=tuple(dict.fromkeys(damage)),
    )


def _verify_file(
    folder: Folder, record: FileRecord, chunks: Iterator[tuple[TensorRecord, Chunk]], damage: list[Damage]
) -> Iterator[int]:
    """Add what is wrong with one file; yield how far it has been read."""
    try:
        file = folder.open(record)
    except CheckpointCorrupted as error:
        damage.append(Damage(problem=str(error), file=record.path))
        lost = "its bytes are lost"
        damage += [Damage(problem=lost, file=record.path, tensor=tensor.key) for tensor, _ in chunks]
        return
    with file:
        if not header_is_intact(file, record):
            damage.append(Damage(problem="the header is not the one that was written", file=record.path))
        blocks = [block for tensor, chunk in chunks for block in _blocks(tensor, chunk)]
        ranges = ((block.begin, block.end) for block in blocks)
        for block, data in zip(blocks, file.ranges(ranges), strict=True):
            if xxhash.xxh3_64_intdigest(data) != block.digest:
                problem = "its bytes are not those that were written"
                damage.append(Damage(problem=problem, file=record.path, tensor=block.key))
            yield block.end


class _Block(NamedTuple):
    key: str
    begin: int
    end: int
    digest: int


def _blocks(tensor: TensorRecord, chunk: Chunk) -> Iterator[_Block]:
    """Yield the blocks of a chunk, each of which has a digest."""
    end = chunk.begin + chunk.box.volume * ITEM_SIZES[tensor.dtype]
    for begin, digest in zip(range(chunk.begin, end, BLOCK_BYTES), chunk.digests, strict=True):
        yield _Block(tensor.key, begin, min(begin + BLOCK_BYTES, end), digest)


def _hopeless(folder: Folder, problem: str) -> Verdict:
    """Return the verdict on a checkpoint whose manifest or index cannot be read."""
    return Verdict(path=str(folder), tensors=0, bytes=0, damage=(Damage(problem=problem),))


def header_is_intact(file: StoredFile, record: FileRecord) -> bool:
    """Return whether a file's header is the one that was written."""
    (length,) = struct.unpack("<Q", file.read(0, 8))
    header = file.read(0, min(8 + length, record.bytes))
    return xxhash.xxh3_64_hexdigest(header) == record.digest
