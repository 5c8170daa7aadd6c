"""A checkpoint opened by one process that reads all of it, a tensor at a time."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.format.folder import read_index, read_manifest
from shard_core.checkpoint.format.manifest import Manifest
from shard_core.checkpoint.storage.opening import open_folder

if TYPE_CHECKING:
    from shard_core.checkpoint.format.reader import TensorReader


class OpenedCheckpoint:
    """The manifest and the index of a checkpoint, and a reader of its tensors; reads no tensor by itself.

    Args:
        path: The checkpoint, a path or a URL.
        storage_options: For the store a URL names.

    Attributes:
        folder: The checkpoint.
        manifest: Its manifest.
        index: Where its tensors are.

    Raises:
        CheckpointNotFound: If the path is no committed checkpoint.
        CheckpointCorrupted: If the manifest or the index is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        self.folder = open_folder(path, storage_options)
        self.manifest = Manifest.from_bytes(read_manifest(self.folder))
        self.index = read_index(self.folder, self.manifest)
        self.index.check_places()

    @functools.cached_property
    def reader(self) -> TensorReader:
        """The reader, made when it is first asked for: it needs torch."""
        from shard_core.checkpoint.format.reader import TensorReader

        return TensorReader(self.folder, self.index)

    @functools.cached_property
    def ties(self) -> dict[str, tuple[str, ...]]:
        """All keys of each tied tensor, sorted, by each of them."""
        groups: dict[str, list[str]] = {}
        for alias, key in self.manifest.aliases.items():
            groups.setdefault(key, [key]).append(alias)
        return {name: tuple(sorted(group)) for group in groups.values() for name in group}
