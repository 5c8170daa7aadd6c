"""Safetensors files as Hugging Face's libraries write them: one, or several with an index."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, Self

import safetensors

from shard_core.checkpoint.dtypes import ITEM_SIZES, torch_dtype
from shard_core.checkpoint.fields import Fields
from shard_core.checkpoint.peers.weights import Layout, Reader, Weights
from shard_core.errors import CheckpointCorrupted

if TYPE_CHECKING:
    import torch

    from shard_core.checkpoint.box import Box

_MOST_INDEX_BYTES = 1 << 28


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
    def of_one(cls, path: Path, file: Path) -> Self:
        """Describe a single file.

        Args:
            path: What the user gave.
            file: The file.

        Raises:
            CheckpointCorrupted: If it is no such file, or holds what is not understood.
        """
        tensors = _layouts(file)
        return cls(path=path, tensors=tensors, files=dict.fromkeys(tensors, file))

    @classmethod
    def of_index(cls, path: Path, index: Path) -> Self:
        """Describe the files that an index names.

        Args:
            path: What the user gave.
            index: The index.

        Raises:
            CheckpointCorrupted: If the index or a file it names is damaged, or the files are not what it says.
        """
        wanted = _read_index(index)
        tensors: dict[str, Layout] = {}
        files: dict[str, Path] = {}
        for name in sorted(set(wanted.values())):
            for tensor, layout in _layouts(index.parent / name).items():
                if wanted.get(tensor, name) == name:
                    tensors[tensor], files[tensor] = layout, index.parent / name
        lacking = [name for name in wanted if name not in tensors]
        if lacking:
            raise CheckpointCorrupted(
                f"{str(index)!r} says that {lacking[0]!r} is in {wanted[lacking[0]]!r}, but it is not; "
                f"{len(lacking)} tensors are lacking."
            )
        return cls(path=path, tensors=tensors, files=files)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Reader]:
        """Map the files that are needed."""
        with contextlib.ExitStack() as stack:
            yield _SafetensorsReader(self, stack)


class _SafetensorsReader(Reader):
    def __init__(self, weights: SafetensorsFiles, stack: contextlib.ExitStack) -> None:
        self._weights = weights
        self._stack = stack
        self._maps: dict[Path, Any] = {}

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        file = self._weights.files[name]
        if file not in self._maps:
            self._maps[file] = self._stack.enter_context(_opened(file))
        whole = self._weights.checked(name, _tensor(self._maps[file], file, name), self._weights.tensors[name].shape)
        yield box, whole[box.slices((0,) * whole.dim())]


def _opened(file: Path) -> Any:
    if not file.is_file():
        raise CheckpointCorrupted(f"{str(file)!r} is not there, or no regular file; the weights are incomplete.")
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


def _layouts(file: Path) -> dict[str, Layout]:
    """Read what tensors are in a file."""
    layouts = {}
    with _opened(file) as opened:
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
    with index.open("rb") as file:
        raw = file.read(_MOST_INDEX_BYTES + 1)
    if len(raw) > _MOST_INDEX_BYTES:
        raise CheckpointCorrupted(f"{str(index)!r} is longer than any index of weights.")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupted(f"{str(index)!r} is no JSON: {error}.") from error
    names = Fields(content, f"the index {str(index)!r}").texts("weight_map")
    for tensor, name in names.items():
        check_inside(name, f"{str(index)!r} says that {tensor!r}")
    return names


def check_inside(name: str, owner: str) -> None:
    """Refuse the name of a file that is not inside the folder which names it.

    Links are followed, since caches are made of them; a name that leads out of the folder is none.

    Args:
        name: A path in that folder.
        owner: What is said to be in the file, and by whom.

    Raises:
        CheckpointCorrupted: If it leads out of the folder.
    """
    # Checked as other systems would read it too: the answer must not depend on who asks.
    paths = (PurePosixPath(name), PureWindowsPath(name))
    if not name or "\0" in name or any(path.anchor or ".." in path.parts for path in paths):
        raise CheckpointCorrupted(f"{owner} is in {name!r}, which is not a file inside the folder.")
