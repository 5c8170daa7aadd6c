"""Files of ``torch.save``: state dicts, alone or among other things, read without executing anything."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from shard_core.checkpoint.interop.nesting import Place, choose
from shard_core.checkpoint.interop.weights import Layout, Reader, Weights
from shard_core.errors import CheckpointCorrupted

if TYPE_CHECKING:
    from shard_core.checkpoint.format.box import Box
    from shard_core.checkpoint.interop.source import Source

_MOST_ENTRIES = 1 << 22
_DEEPEST = 64
_NAMED = re.compile(r"GLOBAL (\S+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchFile(Weights):
    """The tensors of one state dict in a file of ``torch.save``.

    Attributes:
        keys: Where in the file each is.
    """

    keys: Mapping[str, Place]

    @classmethod
    def of(cls, source: Source, key: str | None) -> Self:
        """Describe a file.

        Args:
            source: The file.
            key: Which state dict in it; None if it is one itself.

        Raises:
            CheckpointCorrupted: If it holds anything but tensors, numbers, strings and containers of them.
            InvalidOption: If the key of a state dict must be given.
        """
        path = source.root
        source.fetch(path)
        entries = {place: described(value) for place, value in _entries(path).items()}
        places = choose(entries, key, path)
        found = {name: entries[place] for name, place in places.items()}
        return cls(
            path=path,
            keys=places,
            tensors={name: entry for name, entry in found.items() if isinstance(entry, Layout)},
            others={name: entry for name, entry in found.items() if isinstance(entry, str)},
        )

    @property
    def places(self) -> dict[str, Place]:
        """Where in the file each tensor is."""
        return dict(self.keys)

    @classmethod
    def located(cls, places: Mapping[str, Place], **described: Any) -> Self:
        """Return the weights whose ``places`` these are."""
        return cls(keys=places, **described)

    @contextlib.contextmanager
    def opened(self, source: Source) -> Iterator[Reader]:
        """Map the file."""
        source.fetch(self.path)
        yield _TorchReader(self)


class _TorchReader(Reader):
    def __init__(self, weights: TorchFile) -> None:
        self._weights = weights
        self._entries = _entries(weights.path)

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        value: Any = self._entries.get(self._weights.keys[name])
        found = described(value)
        if isinstance(found, str):
            raise CheckpointCorrupted(f"{name!r} in {str(self._weights.path)!r} is {found} as this rank sees it.")
        whole = self._weights.checked(name, value.detach(), self._weights.tensors[name].shape)
        yield box, whole[box.slices((0,) * whole.dim())]


def load_safely(file: Any, owner: str, **options: Any) -> Any:
    """Read what ``torch.save`` wrote, if it is made of tensors and plain values alone.

    Args:
        file: A path or an open file.
        owner: What it is, for messages.
        options: For ``torch.load``.

    Raises:
        CheckpointCorrupted: If it is anything else; nothing of it was executed.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True, **options)
    except Exception as error:  # a crafted file may make it raise anything
        named = _NAMED.search(str(error))
        if named:
            raise CheckpointCorrupted(
                f"{owner} names {named[1]}, which would have to be executed; only tensors and plain values are read."
            ) from error
        # Torch's own words go on to say how to execute what is in the file.
        reason = "" if isinstance(error, pickle.UnpicklingError) else f": {error}".partition("\n")[0]
        raise CheckpointCorrupted(
            f"{owner} is damaged, or holds more than tensors and plain values ({type(error).__name__}{reason})."
        ) from error


def _entries(path: Path) -> dict[Place, Any]:
    """List everything in a file by the keys that lead to it."""
    found: dict[Place, Any] = {}
    waiting: list[tuple[Place, Any]] = [((), load_safely(path, repr(str(path)), mmap=True))]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [((*place, str(key)), inner) for key, inner in reversed(list(value.items()))]
        elif isinstance(value, list | tuple) and any(isinstance(each, Mapping | torch.Tensor) for each in value):
            waiting += [((*place, str(key)), inner) for key, inner in reversed(list(enumerate(value)))]
        elif place:
            found[place] = value
        else:
            raise CheckpointCorrupted(f"{str(path)!r} holds {_what(value)}, not a state dict.")
        # A file may nest things in themselves.
        if len(place) > _DEEPEST or len(found) + len(waiting) > _MOST_ENTRIES:
            raise CheckpointCorrupted(f"{str(path)!r} is nested too deeply to be a state dict.")
    return found


def described(value: Any) -> Layout | str:
    """Return the layout of a tensor, or in words what else it is."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return _what(value)
    if value.is_quantized or value.is_meta:
        return "a quantized tensor" if value.is_quantized else "a tensor without values"
    return Layout(value.dtype, tuple(value.shape))


def _what(value: Any) -> str:
    layout = getattr(value, "layout", torch.strided)
    if isinstance(value, torch.Tensor) and layout is not torch.strided:
        return f"a tensor of layout {layout}"
    return f"a {type(value).__name__}"
