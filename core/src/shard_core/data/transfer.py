"""Moving a batch to a device, whatever structure the user gave it."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch

from shard_core.structures import map_leaves

T = TypeVar("T")


def move(batch: T, device: torch.device) -> T:
    """Move every tensor in a nested structure.

    Looks into mappings, lists, tuples, named tuples and dataclasses; anything else with a ``to`` method
    (a ``transformers.BatchEncoding``, say) moves itself. The rest is passed on as it is.

    A copy to a CUDA device runs beside the host. Host memory that is not pinned is copied to pinned memory first, in
    which the batch may be changed at once; one that a loader has pinned must stay as it is until the copy is done.

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
        if device.type != "cuda" or leaf.device.type != "cpu":
            return leaf.to(device)
        return _pinned(leaf).to(device, non_blocking=True)
    if not _moves_itself(leaf):
        return leaf
    return leaf.to(device, non_blocking=True) if device.type == "cuda" and _may_not_block(leaf.to) else leaf.to(device)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in pinned memory: a copy out of other memory waits for what the device has yet to do."""
    # Only plain memory can be pinned, and a class of a user's may hold more than that.
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.requires_grad
    return tensor.pin_memory() if plain and tensor.numel() and not tensor.is_pinned() else tensor


def _may_not_block(to: Any) -> bool:
    """Return whether a method ``to`` takes ``non_blocking``, which its loader's pinned memory makes worth giving."""
    parameters = inspect.signature(to).parameters.values()
    return any(each.name == "non_blocking" or each.kind is each.VAR_KEYWORD for each in parameters)
