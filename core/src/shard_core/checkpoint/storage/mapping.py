"""Files of a checkpoint as memory: maps of their bytes, and tensors that view them."""

from __future__ import annotations

import abc
import mmap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class FileRange(NamedTuple):
    """Some bytes of one of several files.

    Attributes:
        file: The file, by its place among them.
        start: The first byte.
        stop: The one after the last.
    """

    file: int
    start: int
    stop: int


class MappedFile:
    """The bytes of one file, read only where they are looked at.

    Args:
        descriptor: The file; it may be closed afterwards.
        flags: How to map it.
    """

    def __init__(self, descriptor: int, flags: int) -> None:
        import torch

        # Writable only because torch warns of read-only memory; nobody writes to it.
        self._map = mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._view = memoryview(self._map)
        self._tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def bytes(self, start: int, stop: int) -> memoryview:
        """View a range of the file."""
        return self._view[start:stop]

    def tensor(self, start: int, stop: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """View a range of the file as a tensor."""
        return self._tensor[start:stop].view(dtype).view(*shape) if shape else self._tensor[start:stop].view(dtype)[0]


class FileMaps(abc.ABC):
    """Maps of the files that a manifest names; each is made when it is first needed."""

    @abc.abstractmethod
    def bring(self, ranges: Iterable[FileRange]) -> None:
        """Bring bytes to where the maps show them; what was not brought may show as zeros.

        Raises:
            CheckpointCorrupted: If a file is not there, or not as long as it was when it was committed.
        """

    @abc.abstractmethod
    def keep(self, brought: Mapping[FileRange, bytes]) -> None:
        """Take what another rank has brought; it need not be brought again."""

    @abc.abstractmethod
    def file(self, number: int) -> MappedFile:
        """Give the map of one file."""

    @abc.abstractmethod
    def release(self) -> None:
        """Let go of what was brought, when nobody will look at it any more."""
