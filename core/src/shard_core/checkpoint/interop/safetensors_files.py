"""Safetensors files as Hugging Face's libraries write them: one, or several with an index."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, Self

import safetensors

from shard_core.checkpoint.format.dtypes import ITEM_SIZES, torch_dtype
from shard_core.checkpoint.format.json_fields import Fields
from shard_core.checkpoint.interop.weights import Layout, Reader, Weights
from shard_core.errors import CheckpointCorrupted

if TYPE_CHECKING:
    import torch

    from shard_core.checkpoint.format.box import Box
    from shard_core.checkpoint.interop.source import Source

_MOST_INDEX_BYTES = 1 << 28
_MOST_HEADER_BYTES = 1 << 27
#: How long the header is, at the begin of a file.
_LENGTH = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SafetensorsFiles(Weights):
    """Tensors in safetensors files.

    The library that reads them checks the headers: their length, that they fit the file and that no two tensors
    overlap. It maps the files, so that only what is looked at is read.

    Attributes:
        files: Which file each tensor is in.
    """

    files: Mapping[str, Path]

    @classmethod
    def of_one(cls, source: Source, file: Path) -> Self:
        """Describe a single file.

        Args:
            source: What the user gave.
            file: The file.

        Raises:
            CheckpointCorrupted: If it is no such file, or holds what is not understood.
        """
        tensors = _layouts(source, file)
        return cls(path=source.root, tensors=tensors, files=dict.fromkeys(tensors, file))

    @classmethod
    def of_index(cls, source: Source, index: Path) -> Self:
        """Describe the files that an index names.

        Args:
            source: What the user gave.
            index: The index.

        Raises:
            CheckpointCorrupted: If the index or a file it names is damaged, or the files are not what it says.
        """
        source.fetch(index)
        wanted = _read_index(index)
        tensors: dict[str, Layout] = {}
        files: dict[str, Path] = {}
        for name in sorted(set(wanted.values())):
            for tensor, layout in _layouts(source, index.parent / name).items():
                if wanted.get(tensor, name) == name:
                    tensors[tensor], files[tensor] = layout, index.parent / name
        lacking = [name for name in wanted if name not in tensors]
        if lacking:
            raise CheckpointCorrupted(
                f"{str(index)!r} says that {lacking[0]!r} is in {wanted[lacking[0]]!r}, but it is not; "
                f"{len(lacking)} tensors are lacking."
            )
        return cls(path=source.root, tensors=tensors, files=files)

    @property
    def places(self) -> dict[str, str]:
        """Which file each tensor is in."""
        return {name: str(file) for name, file in self.files.items()}

    @classmethod
    def located(cls, places: Mapping[str, str], **described: Any) -> Self:
        """Return the weights whose ``places`` these are."""
        return cls(files={name: Path(file) for name, file in places.items()}, **described)

    @contextlib.contextmanager
    def opened(self, source: Source) -> Iterator[Reader]:
        """Map the files that are needed."""
        with contextlib.ExitStack() as stack:
            yield _SafetensorsReader(self, source, stack)

    def moved(self, path: Path) -> Self:
        """Describe the same files where another rank opens them."""
        # An index may be what the user has named; its files are beside it.
        places = {file: os.path.relpath(file, self.path) for file in self.files.values()}
        files = {name: Path(os.path.normpath(path / places[file])) for name, file in self.files.items()}
        return dataclasses.replace(self, path=path, files=files)


class _SafetensorsReader(Reader):
    def __init__(self, weights: SafetensorsFiles, source: Source, stack: contextlib.ExitStack) -> None:
        self._weights = weights
        self._source = source
        self._stack = stack
        self._maps: dict[Path, Any] = {}
        self._begins: dict[Path, dict[str, int]] = {}

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        file = self._weights.files[name]
        if file not in self._maps:
            self._maps[file] = self._stack.enter_context(_opened(self._source, file))
            self._begins[file] = _begins(file)
        self._fetch(file, name, box)
        whole = self._weights.checked(name, _tensor(self._maps[file], file, name), self._weights.tensors[name].shape)
        yield box, whole[box.slices((0,) * whole.dim())]

    def _fetch(self, file: Path, name: str, box: Box) -> None:
        """Fetch what lies between the first and the last element of a box."""
        layout, begin = self._weights.tensors[name], self._begins[file].get(name)
        if begin is None or len(box.offsets) != len(layout.shape):
            return  # reading it raises
        first = last = 0
        for extent, offset, size in zip(layout.shape, box.offsets, box.sizes, strict=True):
            first, last = first * extent + offset, last * extent + offset + size - 1
        self._source.fetch(file, begin + first * layout.dtype.itemsize, begin + (last + 1) * layout.dtype.itemsize)


def _begins(file: Path) -> dict[str, int]:
    """Return where each tensor begins in a file whose header the library has accepted."""
    with file.open("rb") as opened:
        (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
        header: dict[str, Any] = json.loads(opened.read(length))
    data = _LENGTH.size + length
    return {name: data + entry["data_offsets"][0] for name, entry in header.items() if "data_offsets" in entry}


def _opened(source: Source, file: Path) -> Any:
    if not file.is_file():
        raise CheckpointCorrupted(f"{str(file)!r} is not there, or no regular file; the weights are incomplete.")
    source.fetch(file, 0, _LENGTH.size)
    with file.open("rb") as start:
        raw = start.read(_LENGTH.size)
    if len(raw) == _LENGTH.size:
        source.fetch(file, _LENGTH.size, _LENGTH.size + min(_LENGTH.unpack(raw)[0], _MOST_HEADER_BYTES))
    try:
        return safetensors.safe_open(file, framework="pt", device="cpu")
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointCorrupted(f"{str(file)!r} is no intact safetensors file: {error}.") from error


def _tensor(opened: Any, file: Path, name: str) -> torch.Tensor:
    try:
        tensor: torch.Tensor = opened.get_tensor(name)
    except safetensors.SafetensorError as error:
        raise CheckpointCorrupted(f"{str(file)!r} does not hold {name!r} on this rank: {error}.") from error
    return tensor


def _layouts(source: Source, file: Path) -> dict[str, Layout]:
    """Read what tensors are in a file."""
    layouts = {}
    with _opened(source, file) as opened:
        for name in opened.keys():  # noqa: SIM118 - it is no dict
            entry = opened.get_slice(name)
            code = entry.get_dtype()
            if code not in ITEM_SIZES:
                raise CheckpointCorrupted(
                    f"{name!r} in {str(file)!r} has dtype {code}, for which torch has none; only these can be read: "
                    f"{', '.join(ITEM_SIZES)}."
                )
            layouts[name] = Layout(torch_dtype(code), tuple(entry.get_shape()))
    return layouts


def _read_index(index: Path) -> dict[str, str]:
    """Read which file each tensor is in; nothing outside the folder is ever named."""
    if not index.is_file():
        raise CheckpointCorrupted(f"{str(index)!r} is no regular file.")
    with index.open("rb") as file:
        raw = file.read(_MOST_INDEX_BYTES + 1)
    if len(raw) > _MOST_INDEX_BYTES:
        raise CheckpointCorrupted(f"{str(index)!r} is longer than any index of weights.")
    names = Fields.from_json(raw, f"the index {str(index)!r}").texts("weight_map")
    for tensor, name in names.items():
        check_inside(name, f"{str(index)!r} says that {tensor!r}")
    return names


def check_inside(name: str, owner: str) -> None:
    """Check that the name of a file is inside the folder which names it.

    Links are followed, since caches are made of them; a name that leads out of the folder is none.

    Args:
        name: A path in that folder.
        owner: The beginning of the message: what is in the file, according to what.

    Raises:
        CheckpointCorrupted: If it leads out of the folder.
    """
    # Checked as other systems would read it too: the answer must not depend on who asks.
    paths = (PurePosixPath(name), PureWindowsPath(name))
    if not name or "\0" in name or any(path.anchor or ".." in path.parts for path in paths):
        raise CheckpointCorrupted(f"{owner} is in {name!r}, which is not a file inside the folder.")
