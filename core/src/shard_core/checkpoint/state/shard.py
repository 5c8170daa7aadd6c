"""The shards of tensors that live on a rank: boxes, and flat ranges described as boxes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shard_core.checkpoint.format.box import Box, boxes_of_range

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TensorShard:
    """One axis-aligned box of one full tensor.

    Attributes:
        key: The full tensor's name in the checkpoint, e.g. ``"model.head.weight"``.
        shape: The full tensor's shape.
        offsets: Where the box begins.
        view: The box's elements: read on save, filled in place on load.
        write: Whether this rank saves the box; of several ranks that hold a copy, one does.
        stepped: The tensor that the view is of, if nothing but an optimizer's step changes it: an async save may then
            copy it later. None for what may change at any time.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    view: torch.Tensor
    write: bool = True
    stepped: torch.Tensor | None = None

    @property
    def box(self) -> Box:
        """Which box of the full tensor it is."""
        return Box(self.offsets, tuple(self.view.shape))

    @property
    def label(self) -> str:
        """The key of a whole tensor; of a box, the key and its extent."""
        box = self.box
        if box == Box.whole(self.shape):
            return self.key
        extent = ",".join(f"{a}:{a + size}" for a, size in zip(box.offsets, box.sizes, strict=True))
        return f"{self.key}[{extent}]"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FlatPart:
    """What of one parameter lives on this rank where an engine shards parameters flat, anywhere.

    Attributes:
        shape: The full parameter's shape.
        start: The first of its elements that is here, counted row by row.
        values: The elements, flat and without padding; may be none. The very tensor an optimizer steps.
        alias: The tensor through which users write into the same memory, if it counts its changes for itself.
    """

    shape: tuple[int, ...]
    start: int
    values: torch.Tensor
    alias: torch.Tensor | None = None


def shards_of_range(
    key: str,
    shape: Sequence[int],
    start: int,
    flat: torch.Tensor,
    write: bool = True,
    *,
    stepped: torch.Tensor | None = None,
) -> list[TensorShard]:
    """Describe one range of a tensor's elements, as engines with flat shards hold it.

    Args:
        key: The full tensor's name.
        shape: Its shape.
        start: The range's first element, counted row by row.
        flat: The range's elements, without padding; may be none.
        write: Whether this rank saves the range.
        stepped: The tensor that the range is of, if nothing but an optimizer's step changes it.

    Returns:
        Shards whose views share ``flat``'s memory; for an empty range one without elements.

    Example:
        >>> import torch
        >>> [shard.box for shard in shards_of_range("model.w", (2, 3), 2, torch.zeros(2))]
        [Box(offsets=(0, 2), sizes=(1, 1)), Box(offsets=(1, 0), sizes=(1, 1))]
    """
    shape, origin = tuple(shape), (0,) * len(shape)
    if not flat.numel():
        # An empty box of a tensor without dims does not exist; a copy that nobody saves says as much.
        view = flat.new_zeros(shape if 0 in shape else origin)
        return [TensorShard(key=key, shape=shape, offsets=origin, view=view, write=write and bool(shape))]
    shards, place = [], 0
    for box in boxes_of_range(shape, start, start + flat.numel()):
        view = flat[place : place + box.volume].view(box.sizes)
        shards.append(TensorShard(key=key, shape=shape, offsets=box.offsets, view=view, write=write, stepped=stepped))
        place += box.volume
    return shards
