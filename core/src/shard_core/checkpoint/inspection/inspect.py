"""What a checkpoint holds, and whether it is whole, without reading its tensors; needs no torch."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.format.folder import read_index, read_manifest
from shard_core.checkpoint.format.json_fields import Fields
from shard_core.checkpoint.format.manifest import Manifest
from shard_core.checkpoint.format.values import plain
from shard_core.checkpoint.inspection.verify import header_is_intact
from shard_core.checkpoint.keys import FROZEN_KEY, KINDS, RANDOM_KEY, RANDOM_TENSORS
from shard_core.checkpoint.retention.run_folder import run_entry
from shard_core.checkpoint.storage.opening import open_folder
from shard_core.errors import CheckpointCorrupted

if TYPE_CHECKING:
    from shard_core.checkpoint.format.chunk_index import TensorRecord
    from shard_core.checkpoint.storage.interface import Folder

#: What an inspection checks of a checkpoint's integrity.
CHECKED = (
    "the manifest and the index of chunks match their digests",
    "the chunks cover every tensor exactly once",
    "every file is there, as long as it was and with its header",
)
#: What it does not check.
UNCHECKED = "the elements of the tensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindSummary:
    """The tensors of one kind.

    Attributes:
        tensors: How many there are.
        elements: How many elements they have.
        bytes: How much room these take.
        dtypes: How many tensors there are of each dtype, by its name in safetensors files.
    """

    tensors: int
    elements: int
    bytes: int
    dtypes: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """One group of an optimizer.

    Attributes:
        parameters: How many parameters it steps.
        hyper_parameters: Its settings, as simple JSON.
    """

    parameters: int
    hyper_parameters: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSummary:
    """One optimizer.

    Attributes:
        module: The user's name for the module it steps.
        type: Its class's name.
        groups: Its groups.
    """

    module: str
    type: str
    groups: tuple[GroupSummary, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a checkpoint holds.

    Attributes:
        path: The checkpoint.
        step: The value that was saved as ``step``, if there is one.
        created: When it was committed, in seconds since 1970.
        form: ``"sharded"`` or ``"full"``.
        world_size: How many ranks wrote it.
        information: What is recorded about the run: strategy, precision, options.
        kinds: Its tensors by kind: ``model``, ``optim``, ``state``.
        modules: The user's names for the modules.
        aliases: Further names of tied tensors, and the names they are stored under.
        optimizers: By the user's names for them.
        values: The rest of the user's state, as simple JSON.
        files: How many files there are.
        bytes: How long they are.
        chunks: How many chunks the tensors are split into; None where the index cannot be read.
        leftovers: Files beside it that a save that died has left.
        problems: What is wrong with it, as far as ``CHECKED`` goes; empty if nothing is.
        tensors: Every tensor, sorted by key.
    """

    path: str
    step: int | None
    created: float
    form: str
    world_size: int
    information: Mapping[str, Any]
    kinds: Mapping[str, KindSummary]
    modules: tuple[str, ...]
    aliases: Mapping[str, str]
    optimizers: Mapping[str, OptimizerSummary]
    values: Mapping[str, Any]
    files: int
    bytes: int
    chunks: int | None
    leftovers: tuple[str, ...]
    problems: tuple[str, ...]
    tensors: tuple[TensorRecord, ...]


def inspect(
    path: str | os.PathLike[str],
    progress: Callable[[int, int], None] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> Inspection:
    """Inspect a checkpoint without reading its tensors.

    Args:
        path: The checkpoint, a path or a URL.
        progress: Called with the files checked so far and in all.
        storage_options: For the store a URL names.

    Raises:
        CheckpointNotFound: If the path is no committed checkpoint.
        CheckpointCorrupted: If its manifest is damaged, so that nothing it says can be believed.
    """
    folder = open_folder(path, storage_options)
    manifest = Manifest.from_bytes(read_manifest(folder))
    chunks, problems = _check(folder, manifest, progress)
    entry = run_entry(folder)
    try:
        optimizers = {name: _optimizer(name, content) for name, content in manifest.optimizers.items()}
        values = {name: plain(value) for name, value in manifest.values.items() if name not in (RANDOM_KEY, FROZEN_KEY)}
        information = {name: plain(value) for name, value in manifest.information.items()}
    except RecursionError as error:
        raise CheckpointCorrupted(f"the manifest of {str(folder)!r} holds values nested too deeply.") from error
    return Inspection(
        path=str(folder),
        step=manifest.step,
        created=manifest.created / 1e9,
        form=manifest.form,
        world_size=manifest.world_size,
        information=information,
        kinds={kind: _kind(manifest, kind) for kind in KINDS},
        modules=tuple(manifest.modules),
        aliases=manifest.aliases,
        optimizers=optimizers,
        values=values,
        files=len(manifest.files) + 1,
        bytes=manifest.index.bytes + sum(file.bytes for file in manifest.files),
        chunks=chunks,
        leftovers=tuple(sorted(entry.leftovers)) if entry else (),
        problems=tuple(problems),
        tensors=manifest.tensors,
    )


def _check(
    folder: Folder, manifest: Manifest, progress: Callable[[int, int], None] | None
) -> tuple[int | None, list[str]]:
    """Count the chunks, and list what is wrong."""
    problems: list[str] = []
    chunks = None
    try:
        index = read_index(folder, manifest)
        index.check_places()
        chunks = len(index)
    except CheckpointCorrupted as error:
        problems.append(str(error))
    for number, record in enumerate(manifest.files, 1):
        try:
            file = folder.open(record)
        except CheckpointCorrupted as error:
            problems.append(str(error))
        else:
            with file:
                if not header_is_intact(file, record):
                    problems.append(f"the header of {record.path!r} is not the one that was written.")
        if progress:
            progress(number, len(manifest.files))
    return chunks, problems


def _kind(manifest: Manifest, kind: str) -> KindSummary:
    of_kind = [tensor for tensor in manifest.tensors if tensor.key.startswith(f"{kind}.")]
    tensors = [tensor for tensor in of_kind if not tensor.key.startswith(RANDOM_TENSORS)]
    return KindSummary(
        tensors=len(tensors),
        elements=sum(math.prod(tensor.shape) for tensor in tensors),
        bytes=sum(tensor.bytes for tensor in tensors),
        dtypes=dict(sorted(collections.Counter(tensor.dtype for tensor in tensors).items())),
    )


def _optimizer(name: str, content: Any) -> OptimizerSummary:
    fields = Fields(content, f"optimizer {name!r} in the manifest")
    groups = [plain(group) for group in fields.items("groups")]
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        raise CheckpointCorrupted("the manifest holds an optimizer group without its parameters' names.")
    return OptimizerSummary(
        module=fields.text("module"),
        type=fields.text("type"),
        groups=tuple(
            GroupSummary(
                parameters=len(group["params"]),
                hyper_parameters={key: value for key, value in group.items() if key != "params"},
            )
            for group in groups
        ),
    )
