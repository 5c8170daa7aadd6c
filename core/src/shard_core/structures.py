"""Walking nested structures: mappings, lists, tuples, named tuples and dataclasses, and what optimizers keep."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final

import torch

_OWN: Final = ("param_groups", "state", "defaults")
"""The attributes that torch documents, which are repointed by themselves."""


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
        # A list, for what torch's functions of two results return takes nothing else.
        return type(data)([changed(f"[{place}]", value) for place, value in enumerate(data)])
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


def follow_references(
    optimizer: torch.optim.Optimizer,
    replaced: Mapping[torch.Tensor, torch.Tensor],
    lay_out: Callable[[torch.Tensor, torch.Tensor], Any],
) -> None:
    """Replace parameters that an optimizer keeps in attributes of its own, in lists, dicts and sets, in place.

    Many older optimizers step from a list that they have made themselves, or look buffers up by a parameter or its
    ``id``; they would go on with parameters that nobody trains any more.

    Args:
        optimizer: Whose groups are repointed.
        replaced: The parameters that it holds now by those that it held.
        lay_out: Lays a tensor that is kept for a parameter, and has its shape, out like the new one.
    """
    replacement = _Replacement(replaced, lay_out)
    for name, value in list(vars(optimizer).items()):
        if name not in _OWN:
            vars(optimizer)[name] = replacement.of(value)


class _Replacement:
    """Replaces parameters, and the numbers that ``id`` gives them, in containers of containers."""

    def __init__(
        self,
        replaced: Mapping[torch.Tensor, torch.Tensor],
        lay_out: Callable[[torch.Tensor, torch.Tensor], Any],
    ) -> None:
        self._by_id = {id(old): (old, new) for old, new in replaced.items() if old is not new}
        self._lay_out = lay_out
        self._seen: set[int] = set()

    def of(self, value: Any) -> Any:
        """Return what stands in the place of a value; containers are changed in place, tuples made anew."""
        if isinstance(value, torch.Tensor) and id(value) in self._by_id:
            return self._by_id[id(value)][1]
        if type(value) is int and value in self._by_id:
            return id(self._by_id[value][1])
        if isinstance(value, list | dict | set) and id(value) not in self._seen:
            self._seen.add(id(value))
            self._within(value)
        elif type(value) is tuple:
            items = [self.of(each) for each in value]
            return value if all(new is old for new, old in zip(items, value, strict=True)) else tuple(items)
        return value

    def _within(self, container: Any) -> None:
        if isinstance(container, list):
            container[:] = [self.of(each) for each in container]
        elif isinstance(container, set):
            items = [self.of(each) for each in container]
            container.clear()
            container.update(items)
        else:
            pairs = [(self.of(key), self._kept_for(key, self.of(value))) for key, value in container.items()]
            container.clear()
            container.update(pairs)

    def _kept_for(self, key: Any, value: Any) -> Any:
        """Lay out what is kept for a parameter."""
        old, new = self._by_id.get(key if type(key) is int else id(key), (None, None))
        is_like = isinstance(value, torch.Tensor) and old is not None and value.shape == old.shape and value is not new
        return self._lay_out(new, value) if is_like and new is not None else value
