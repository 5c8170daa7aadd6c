"""Walking nested structures: mappings, lists, tuples, named tuples and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any


def is_nested(data: object) -> bool:
    """Return whether a value is a structure to look into, rather than a leaf."""
    if isinstance(data, type):
        return False
    return isinstance(data, Mapping | list | tuple) or dataclasses.is_dataclass(data)


def map_leaves(
    data: Any,
    change: Callable[[str, Any], Any],
    is_leaf: Callable[[Any], bool] = lambda _: False,
    path: str = "",
) -> Any:
    """Return a structure of the same types with other leaves; the given one is not changed.

    Args:
        data: A leaf or a structure.
        change: Takes a leaf's path and the leaf, and returns what stands there instead.
        is_leaf: Whether a structure is not to be looked into.
        path: Where ``data`` stands.

    Returns:
        The new structure.

    Example:
        >>> map_leaves({"a": [1, 2], "b": (3,)}, lambda path, leaf: f"{path} was {leaf}")
        {'a': ["['a'][0] was 1", "['a'][1] was 2"], 'b': ("['b'][0] was 3",)}
    """

    def changed(step: str, value: Any) -> Any:
        return map_leaves(value, change, is_leaf, path + step)

    if is_leaf(data) or not is_nested(data):
        return change(path, data)
    if isinstance(data, Mapping):
        entries = {key: changed(f"[{key!r}]", value) for key, value in data.items()}
        return _refilled(data, entries) if isinstance(data, MutableMapping) else entries
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(changed(f".{name}", value) for name, value in zip(data._fields, data, strict=True)))
    if isinstance(data, list):
        return _refilled(data, {place: changed(f"[{place}]", value) for place, value in enumerate(data)})
    if isinstance(data, tuple):
        return type(data)(changed(f"[{place}]", value) for place, value in enumerate(data))
    instance = copy.copy(data)
    for field in dataclasses.fields(data):
        # A frozen dataclass refuses plain assignment, and __init__ may not take every field.
        object.__setattr__(instance, field.name, changed(f".{field.name}", getattr(data, field.name)))
    return instance


def _refilled(container: Any, entries: Mapping[Any, Any]) -> Any:
    """Return a copy with other entries, one by one.

    The constructor of a user's class may take something else, ``update`` adds to a ``Counter``, and outputs of
    transformers have none.
    """
    filled = copy.copy(container)
    for key, value in entries.items():
        filled[key] = value
    return filled
