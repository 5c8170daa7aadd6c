"""The interface of foreign formats: tensors by name, of which any box can be read."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shard_core.errors import CheckpointCorrupted

if TYPE_CHECKING:
    import torch

    from shard_core.checkpoint.format.box import Box
    from shard_core.checkpoint.interop.source import Source


class Reader(abc.ABC):
    """Files of a foreign format, opened on one rank."""

    @abc.abstractmethod
    def read(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """Read a box of a tensor.

        Args:
            name: The tensor's name in the files.
            box: Any box of it that holds an element.

        Yields:
            Boxes that tile it, and views of what is stored of them, which must not be written to.

        Raises:
            CheckpointCorrupted: If what is stored is not what was described.
        """

    def check(self, name: str, box: Box) -> None:
        """Check that a box can be read, without reading its elements.

        Args:
            name: The tensor's name in the files.
            box: Any box of it that holds an element.

        Raises:
            CheckpointCorrupted: If what is stored is not what was described.
        """
        for _ in self.read(name, box):
            pass  # views of mapped files cost nothing


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a stored tensor is, without its elements.

    Attributes:
        dtype: Its dtype.
        shape: Its full shape.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights(abc.ABC):
    """Files of a foreign format: described by rank 0, sent to every rank, and read where they are needed.

    Attributes:
        path: The file or the folder, as this rank opens it.
        tensors: The tensors by the names they have in the files.
        others: What is no dense tensor, and what it is.
    """

    path: Path
    tensors: Mapping[str, Layout]
    others: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @abc.abstractmethod
    def opened(self, source: Source) -> contextlib.AbstractContextManager[Reader]:
        """Open the files on this rank; what is read is valid inside the context.

        Args:
            source: Fetches their bytes.
        """

    @property
    @abc.abstractmethod
    def places(self) -> Any:
        """Where each tensor is, in plain values, as ``located`` takes them."""

    @classmethod
    @abc.abstractmethod
    def located(cls, places: Any, **described: Any) -> Self:
        """Return the weights whose ``places`` these are.

        Args:
            places: Where each tensor is.
            described: The attributes that all weights have.
        """

    def to_plain(self) -> dict[str, Any]:
        """Describe the files in plain values, which can be sent to other ranks."""
        tensors = {name: (layout.dtype, tuple(layout.shape)) for name, layout in self.tensors.items()}
        return {"path": str(self.path), "tensors": tensors, "others": dict(self.others), "places": self.places}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the weights that ``to_plain`` has described on another rank."""
        tensors = {name: Layout(dtype, shape) for name, (dtype, shape) in plain["tensors"].items()}
        return cls.located(plain["places"], path=Path(plain["path"]), tensors=tensors, others=plain["others"])

    def moved(self, path: Path) -> Self:
        """Describe the same files where another rank opens them."""
        return dataclasses.replace(self, path=path)

    def checked(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Check that a tensor which was read is what was described, and return it.

        Args:
            name: Its name in the files.
            tensor: What was read of it.
            shape: The shape that must have.

        Raises:
            CheckpointCorrupted: If it is not.
        """
        dtype = self.tensors[name].dtype
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            raise CheckpointCorrupted(
                f"{name!r} in {str(self.path)!r} should be {dtype_name(dtype)} of shape {shape}, but "
                f"{dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)} was read; the files are damaged, or not "
                "the same on every rank."
            )
        return tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as people write it.

    Example:
        >>> import torch
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
