"""Exporting the weights in a checkpoint to a folder that Hugging Face's libraries load, a tensor at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shard_core.checkpoint.format.box import Box
from shard_core.checkpoint.format.dtypes import torch_dtype
from shard_core.checkpoint.inspection.opened import OpenedCheckpoint
from shard_core.checkpoint.interop.casting import overflows
from shard_core.checkpoint.interop.hf_layout import (
    Configuration,
    divide,
    is_of_an_export,
    whole_file,
    write_weights_index,
)
from shard_core.checkpoint.interop.peft_layout import ADAPTER_WEIGHTS_NAME, AdapterConfiguration
from shard_core.checkpoint.keys import frozen_keys, model_key
from shard_core.checkpoint.save.writer import Entry, TensorFileWriter
from shard_core.checkpoint.storage.local import LocalFolder, fsync_folder
from shard_core.checkpoint.storage.opening import is_url
from shard_core.errors import CheckpointError, InvalidOption, nearest

if TYPE_CHECKING:
    from shard_core.checkpoint.storage.interface import Folder

#: The dtypes that weights can be cast to, by the names people type.
DTYPES = {
    "fp32": "F32", "float32": "F32", "bf16": "BF16", "bfloat16": "BF16", "fp16": "F16", "float16": "F16",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export made.

    Attributes:
        path: The folder.
        files: The files of weights in it.
        tensors: How many tensors they hold.
        bytes: How much room these take.
        dtypes: The tensors' dtypes, by their names in safetensors files.
        tied: Names that were left out because they are tied, and those that stand for them.
    """

    path: str
    files: tuple[str, ...]
    tensors: int
    bytes: int
    dtypes: tuple[str, ...]
    tied: Mapping[str, str]


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_size: int = 5 * 10**9,
    config: str | os.PathLike[str] | None = None,
    module: str | None = None,
    adapter: str | None = None,
    prefix: str = "",
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write the weights of one module into a new folder, in the layout that ``from_pretrained`` loads.

    Of tied tensors each is written once, under the name that the checkpoint keeps it by, as transformers does. The
    folder appears under its name when it is complete. Memory is that of the largest tensor.

    Args:
        path: The checkpoint, a path or a URL.
        out: The folder to make, on a disk.
        dtype: What floating-point tensors are cast to: ``"fp32"``, ``"bf16"`` or ``"fp16"``; None leaves them.
        max_shard_size: How many bytes of tensors a file may hold; a larger tensor has a file of its own.
        config: A model's configuration to put beside: a JSON file, or a folder that holds a ``config.json`` and
            perhaps a tokenizer. With an ``adapter_config.json`` instead, PEFT's adapters alone are written, as its
            ``from_pretrained`` loads them.
        module: The user's name for the module; None for the only one.
        adapter: Which adapters, by the name they have in the model; None for the only ones.
        prefix: Only tensors whose names begin with this, which is taken off: ``"model."`` where the model was an
            attribute of another module.
        overwrite: Whether an export that stands there is replaced.
        storage_options: For the store that the checkpoint's URL names.
        progress: Called with the bytes written so far and in all.

    Raises:
        CheckpointNotFound: If the path is no committed checkpoint.
        CheckpointCorrupted: Naming the damaged tensors.
        InvalidOption: If an argument is not as it must be, or something stands there that is not to be replaced.
        CheckpointError: If the folder cannot be written, or the dtype asked for cannot hold a number.
    """
    if max_shard_size < 1:
        raise InvalidOption(f"max_shard_size is {max_shard_size!r}; it must be a number of bytes from 1 up.")
    if is_url(out):
        raise InvalidOption(f"{os.fspath(out)!r} is a URL, and an export goes to a disk; give the path of a folder.")
    target = Path(os.path.abspath(out))
    opened = OpenedCheckpoint(path, storage_options)
    code = _code(dtype)
    start = _start(opened, module, prefix)
    adapters = AdapterConfiguration.find(Path(config)) if config is not None else None
    configuration = Configuration.find(Path(config)) if config is not None and adapters is None else None
    if adapters is None:
        _check_whole(opened, start, adapter)
    keys, tied = _names(opened, start, prefix)
    if adapters is not None:
        # Tied tensors are stored under each of their names, as PEFT does.
        keys |= {alias: keys[name] for alias, name in tied.items()}
        keys, tied = {stored: keys[name] for stored, name in adapters.names(keys, adapter).items()}, {}
    _check_target(target, opened.folder, overwrite)
    entries = [_entry(opened, name, key, code) for name, key in keys.items()]
    files = divide(entries, max_shard_size) if adapters is None else [whole_file(ADAPTER_WEIGHTS_NAME, entries)]
    total, done = sum(entry.bytes for file in files for entry in file.entries), 0
    with _folder(target) as folder:
        for file in files:
            with TensorFileWriter(folder, file.name, file.entries) as writer:
                for entry in file.entries:
                    writer.write(_tensor(opened, keys[entry.name], entry.dtype))
                    done += entry.bytes
                    if progress:
                        progress(done, total)
                writer.finish()
        write_weights_index(folder, files)
        if configuration is not None:
            configuration.write(folder, code)
        if adapters is not None:
            adapters.write(folder)
    return Exported(
        path=os.fspath(out),
        files=tuple(file.name for file in files),
        tensors=len(keys),
        bytes=total,
        dtypes=tuple(sorted({entry.dtype for file in files for entry in file.entries})),
        tied=tied,
    )


def _code(dtype: str | None) -> str | None:
    if dtype is not None and dtype not in DTYPES:
        raise InvalidOption(f"dtype {dtype!r} is none of: {', '.join(DTYPES)}{nearest(dtype, DTYPES) or '.'}")
    return None if dtype is None else DTYPES[dtype]


def _start(opened: OpenedCheckpoint, module: str | None, prefix: str) -> str:
    """Return what the keys of the tensors to be written begin with."""
    modules = opened.manifest.modules
    held = ", ".join(map(repr, modules)) or "none"
    if module is None and len(modules) != 1:
        raise InvalidOption(
            f"{str(opened.folder)!r} holds the modules {held}; say which one with module=NAME (--module)."
        )
    if module is not None and module not in modules:
        raise InvalidOption(f"module {module!r} is not in the checkpoint{nearest(module, modules)}; it holds: {held}.")
    return model_key((modules[module] if module is not None else next(iter(modules.values()))) + prefix)


def _check_whole(opened: OpenedCheckpoint, start: str, adapter: str | None) -> None:
    """Refuse adapters without their configuration, and weights of which the save has left some out."""
    if adapter is not None:
        raise InvalidOption(
            f"adapter={adapter!r} is for adapters alone; give their adapter_config.json, or the folder it is in, with "
            "config=PATH (--config)."
        )
    # Of another module, or outside the prefix, nothing is missed here.
    if any(key.startswith(start) for key in frozen_keys(opened.manifest.values)):
        raise InvalidOption(
            f"{str(opened.folder)!r} was saved without what is frozen, so it is no whole model; for PEFT's adapters, "
            "give their adapter_config.json, or the folder it is in, with config=PATH (--config)."
        )


def _names(opened: OpenedCheckpoint, start: str, prefix: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the key of each tensor to be written by the name it will have, and the tied names that are left out."""
    keys = {
        tensor.key.removeprefix(start): tensor.key
        for tensor in opened.manifest.tensors
        if tensor.key.startswith(start) and tensor.key != start
    }
    aliases = {alias: key for alias, key in opened.manifest.aliases.items() if alias.startswith(start)}
    # A tensor that is kept under a name outside the prefix, and tied to one inside it.
    for alias, key in sorted(aliases.items()):
        if not key.startswith(start) and key not in keys.values():
            keys[alias.removeprefix(start)] = key
    if not keys:
        raise InvalidOption(f"{str(opened.folder)!r} has no tensor of the module whose name begins with {prefix!r}.")
    known = {key: name for name, key in keys.items()}
    tied = {alias.removeprefix(start): known[key] for alias, key in aliases.items()}
    return keys, {alias: name for alias, name in tied.items() if alias != name}


def _entry(opened: OpenedCheckpoint, name: str, key: str, code: str | None) -> Entry:
    record = opened.index.record(key)
    cast = code is not None and torch_dtype(record.dtype).is_floating_point
    return Entry(name=name, dtype=code if cast and code else record.dtype, shape=record.shape)


def _tensor(opened: OpenedCheckpoint, key: str, code: str) -> torch.Tensor:
    """Read a tensor into host memory, verified, in the dtype asked for."""
    record = opened.index.record(key)
    tensor = torch.empty(record.shape, dtype=torch_dtype(code))
    reads = opened.reader.plan(key, Box.whole(record.shape))
    opened.reader.verify(reads)
    for read in reads:
        for box, source in opened.reader.pieces(read):
            tensor[box.slices((0,) * tensor.dim())].copy_(source)
            if overflows(source, tensor.dtype):
                raise CheckpointError(f"{key!r} holds numbers too large for {code}; export it in another dtype.")
    opened.reader.release()
    return tensor


def _check_target(target: Path, checkpoint: Folder, overwrite: bool) -> None:
    if isinstance(checkpoint.path, Path) and checkpoint.path.resolve() in (target.resolve(), *target.resolve().parents):
        raise InvalidOption(f"{str(target)!r} is inside the checkpoint; give a folder elsewhere.")
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise InvalidOption(f"{str(target)!r} is no folder; give the path of a folder to be made.")
    unknown = sorted(each.name for each in target.iterdir() if not is_of_an_export(each.name) or not each.is_file())
    if unknown:
        raise InvalidOption(
            f"{str(target)!r} exists and holds {unknown[0]!r}, which no export made; give another folder."
        )
    if any(target.iterdir()) and not overwrite:
        raise InvalidOption(f"{str(target)!r} exists; give another folder, or overwrite=True (--overwrite).")


@contextlib.contextmanager
def _folder(target: Path) -> Iterator[LocalFolder]:
    """Yield a folder to write into, which is renamed to the target only when all went well."""
    unfinished = target.with_name(f"{target.name}.unfinished-{secrets.token_hex(6)}")
    try:
        unfinished.mkdir(parents=True)
        yield LocalFolder(unfinished)
        fsync_folder(unfinished)
        replaced = target.with_name(f"{target.name}.replaced-{secrets.token_hex(6)}")
        if target.exists():
            target.rename(replaced)
        unfinished.rename(target)
        fsync_folder(target.parent)
        if replaced.exists():
            shutil.rmtree(replaced)
    except OSError as error:
        raise CheckpointError(f"{str(target)!r} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
