"""Recognizing what a path holds by its content: which foreign format, or a checkpoint of Shard's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.format.foreign_formats import (
    BEGINNING_BYTES,
    INDEX_SUFFIX,
    METADATA_NAME,
    beginning,
    is_distributed,
    is_safetensors,
    is_zip,
)
from shard_core.checkpoint.format.manifest import MANIFEST_NAME
from shard_core.checkpoint.interop.peft_layout import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME, AdapterConfiguration
from shard_core.checkpoint.storage.local import LocalFolder
from shard_core.errors import CheckpointError, CheckpointNotFound, InvalidOption, nearest

if TYPE_CHECKING:
    from shard_core.checkpoint.interop.source import Source
    from shard_core.checkpoint.interop.weights import Weights

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

_KINDS = (
    "a folder of safetensors files, a folder of torch.distributed.checkpoint, a safetensors file, or a file of "
    "torch.save"
)


def find_weights(source: Source, key: str | None) -> Weights:
    """Recognize what a path holds, and describe it.

    Args:
        source: A file or a folder.
        key: Which state dict in it; None if it is one itself.

    Raises:
        CheckpointNotFound: If it holds no weights that can be read.
        CheckpointError: If it is a checkpoint of Shard's own.
        CheckpointCorrupted: If the files are damaged, or hold what would have to be executed.
        InvalidOption: If a state dict, or a file, must be chosen.
    """
    from shard_core.checkpoint.interop.dcp import DCPFolder
    from shard_core.checkpoint.interop.safetensors_files import SafetensorsFiles
    from shard_core.checkpoint.interop.torch_file import TorchFile

    path = source.root
    source.fetch(path, 0, BEGINNING_BYTES)
    if LocalFolder(path).holds(MANIFEST_NAME):
        raise CheckpointError(f"{str(path)!r} is a checkpoint of Shard's own; load_checkpoint() loads it.")
    if is_distributed(path):
        return DCPFolder.of(source, path / METADATA_NAME, key)
    if path.is_file() and is_zip(path):
        return TorchFile.of(source, key)
    file = _safetensors(path)
    if file is None:
        raise CheckpointNotFound(f"{str(path)!r} {_absence(path)}")
    if key is not None:
        raise InvalidOption(
            f"key={key!r} is for files that hold several state dicts; {str(file)!r} holds one, leave it out."
        )
    if file.name.endswith(INDEX_SUFFIX):
        return SafetensorsFiles.of_index(source, file)
    return SafetensorsFiles.of_one(source, file)


def find_adapters(source: Source) -> AdapterConfiguration | None:
    """Return the configuration of PEFT's adapters if a path holds their weights; None if it holds others.

    Args:
        source: A file or a folder.

    Raises:
        CheckpointCorrupted: If what should be their configuration is none.
    """
    weights = source.root / ADAPTER_WEIGHTS_NAME if source.root.is_dir() else source.root
    source.fetch(weights.with_name(ADAPTER_CONFIG_NAME))
    return AdapterConfiguration.beside(weights)


def received_weights(kind: str, plain: Mapping[str, Any]) -> Weights:
    """Return the weights that another rank has found.

    Args:
        kind: The name of their class.
        plain: What their ``to_plain`` returned.
    """
    from shard_core.checkpoint.interop.dcp import DCPFolder
    from shard_core.checkpoint.interop.safetensors_files import SafetensorsFiles
    from shard_core.checkpoint.interop.torch_file import TorchFile

    kinds: dict[str, type[Weights]] = {each.__name__: each for each in (DCPFolder, SafetensorsFiles, TorchFile)}
    return kinds[kind].from_plain(plain)


def _safetensors(path: Path) -> Path | None:
    """Return the one safetensors file, or the index of several; None if there is neither."""
    if path.is_file():
        return path if path.name.endswith(INDEX_SUFFIX) or is_safetensors(path) else None
    if not path.is_dir():
        return None
    indexes = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    files = sorted(path.glob("*.safetensors"))
    # Where both are there, libraries take the single file, and it is easily a left-over of another save.
    whole = [
        file
        for file in files
        if file.name.removesuffix(".safetensors") in {index.name.removesuffix(INDEX_SUFFIX) for index in indexes}
    ]
    found = indexes + whole if indexes else files
    if len(found) > 1:
        names = ", ".join(repr(each.name) for each in found[:8])
        raise InvalidOption(
            f"{str(path)!r} holds {names}{' and more' if len(found) > 8 else ''}, and it cannot be seen which of them "
            f"is meant; give the path of one, or put a *{INDEX_SUFFIX} beside them."
        )
    return found[0] if found else None


def _absence(path: Path) -> str:
    if not path.exists():
        beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        return f"does not exist{nearest(path.name, beside) or '.'}"
    if path.is_file() and beginning(path, 1) == b"\x80":
        return (
            "is a pickle, as torch.save wrote it before torch 1.6 or with _use_new_zipfile_serialization=False; "
            "save it again with torch.save(torch.load(path, weights_only=True), path)."
        )
    if not path.is_dir():
        return f"holds no weights that can be read; they may be in {_KINDS}."
    if any(path.glob("*.bin.index.json")):
        return (
            "holds several files of torch.save with an index, which is not read; load them with the library that wrote "
            "them, and save them as safetensors."
        )
    files = sorted(each.name for each in path.iterdir() if each.suffix in _TORCH_SUFFIXES)
    if files:
        return f"holds no safetensors files, but {files[0]!r}; give the path of a file to read that."
    return f"holds no weights that can be read; they may be in {_KINDS}."
