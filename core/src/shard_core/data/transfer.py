"""Moving a batch to a device, whatever structure the user gave it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from shard_core.structures import map_leaves

T = TypeVar("T")


def move(batch: T, device: torch.device) -> T:
    """Move every tensor in a nested structure.

    Looks into mappings, lists, tuples, named tuples and dataclasses; anything else with a ``to`` method
    (a ``transformers.BatchEncoding``, say) moves itself. The rest is passed on as it is.

    Args:
        batch: Any nested structure; it is not changed.
        device: Where to.

    Returns:
        The same structure; tensors that are there already are not copied.

    Example:
        >>> move({"text": "a", "ids": [torch.ones(1), (2, None)]}, torch.device("cpu"))
        {'text': 'a', 'ids': [tensor([1.]), (2, None)]}
    """
    moved: Any = map_leaves(batch, lambda _, leaf: _moved(leaf, device), is_leaf=_moves_itself)
    return moved  # type: ignore[no-any-return]  # the structure is that of the batch


def _moves_itself(data: Any) -> bool:
    return not isinstance(data, type) and callable(getattr(data, "to", None))


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        # Only a copy out of pinned memory can run beside the host; elsewhere the flag means nothing.
        return leaf.to(device, non_blocking=device.type == "cuda")
    return leaf.to(device) if _moves_itself(leaf) else leaf
