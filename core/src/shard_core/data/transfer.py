"""Moving a batch to a device, whatever structure the user gave it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any, TypeVar

import torch

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
    moved: Any = _moved(batch, device)
    return moved  # type: ignore[no-any-return]  # the structure is that of the batch


def _moved(data: Any, device: torch.device) -> Any:  # noqa: PLR0911 - one return per kind of structure
    if isinstance(data, torch.Tensor):
        # Only a copy out of pinned memory can run beside the host; elsewhere the flag means nothing.
        return data.to(device, non_blocking=device.type == "cuda")
    if isinstance(data, type):
        return data
    if callable(getattr(data, "to", None)):
        return data.to(device)
    if isinstance(data, MutableMapping):
        mapping = copy.copy(data)
        mapping.update({key: _moved(value, device) for key, value in data.items()})
        return mapping
    if isinstance(data, Mapping):
        return {key: _moved(value, device) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_moved(value, device) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(_moved(value, device) for value in data)
    if dataclasses.is_dataclass(data):
        instance = copy.copy(data)
        for field in dataclasses.fields(data):
            # A frozen dataclass refuses plain assignment, and __init__ may not take every field.
            object.__setattr__(instance, field.name, _moved(getattr(data, field.name), device))
        return instance
    return data
