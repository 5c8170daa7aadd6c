"""In which optimizers and values two checkpoints differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.format.json_fields import Fields
from shard_core.checkpoint.format.values import plain
from shard_core.checkpoint.keys import RANDOM_KEY, model_key, name_in
from shard_core.checkpoint.state.optimizer_record import KERNEL_CHOICES

if TYPE_CHECKING:
    from shard_core.checkpoint.inspection.opened import OpenedCheckpoint

#: What differs, and how.
Found = Iterator[tuple[str, str]]


def value_differences(one: OpenedCheckpoint, other: OpenedCheckpoint, tolerance: float | None) -> Found:
    """Compare the users' values by name; tensors in them are compared as tensors, random number generators not."""
    here, there = (
        plain({name: value for name, value in side.manifest.values.items() if name != RANDOM_KEY})
        for side in (one, other)
    )
    yield from _differences("", here, there, tolerance)


def optimizer_differences(one: OpenedCheckpoint, other: OpenedCheckpoint, tolerance: float | None) -> Found:
    """Compare optimizers: groups by the parameters in them, hyper-parameters, and state of one element.

    How an optimizer computes (``fused``, say) is no difference, nor is the type of a number.
    """
    here = {name: _Optimizer(one, name, content) for name, content in one.manifest.optimizers.items()}
    there = {name: _Optimizer(other, name, content) for name, content in other.manifest.optimizers.items()}
    for name in sorted({*here, *there}):
        if name not in here or name not in there:
            yield name, f"not in the {'first' if name not in here else 'second'}"
            continue
        if here[name].type != there[name].type:
            yield name, f"type {here[name].type} against {there[name].type}"
        yield from _group_differences(name, here[name], there[name], tolerance)
        yield from _scalar_differences(name, here[name].scalars, there[name].scalars, tolerance)


def _scalar_differences(name: str, one: Any, other: Any, tolerance: float | None) -> Found:
    """Compare step counts and the like; what differs alike in many parameters is listed once."""
    alike: dict[tuple[str, str], list[str]] = {}
    for parameter in sorted({*one, *other}):
        for slot, problem in _differences("", one.get(parameter, {}), other.get(parameter, {}), tolerance):
            alike.setdefault((slot, problem), []).append(parameter)
    for (slot, problem), parameters in alike.items():
        yield f"{name} {slot}", f"{problem}, of {_shown(frozenset(parameters))}"


class _Optimizer:
    """One optimizer as simple JSON, with names that do not depend on which of its tied names a parameter has."""

    def __init__(self, side: OpenedCheckpoint, name: str, content: Any) -> None:
        owner = f"optimizer {name!r} in the manifest"
        fields = Fields(content, owner)
        self._side = side
        self._prefix = side.manifest.modules.get(fields.text("module"), "")
        self.type = fields.text("type")
        scalars = Fields({"scalars": plain(fields.mapping("scalars"))}, owner).mapping("scalars")
        self.scalars = {self._parameter(key): slots for key, slots in scalars.items()}
        self.groups: list[tuple[frozenset[str], dict[str, Any]]] = []
        for each in fields.items("groups"):
            group = plain(each)
            names = Fields(group, f"a group of optimizer {name!r} in the manifest").items("params")
            settings = {key: value for key, value in group.items() if key not in KERNEL_CHOICES | {"params"}}
            self.groups.append((frozenset(self._parameter(str(key)) for key in names), settings))

    def _parameter(self, name: str) -> str:
        key = model_key(self._prefix + name)
        return name_in(self._side.ties.get(key, (key,))[0])


def _group_differences(name: str, one: _Optimizer, other: _Optimizer, tolerance: float | None) -> Found:
    left = list(other.groups)
    for place, group in enumerate(one.groups):
        if not left:
            yield f"{name} group {place}", f"only in the first, of {_shown(group[0])}"
            continue
        match = min(left, key=lambda each, names=group[0]: len(each[0] ^ names))  # type: ignore[misc]
        left.remove(match)
        lacking, more = group[0] - match[0], match[0] - group[0]
        if lacking or more:
            only = [
                f"{_shown(each)} only in the {which}" for each, which in ((lacking, "first"), (more, "second")) if each
            ]
            yield f"{name} group {place}", f"other parameters: {'; '.join(only)}"
        yield from _differences(f"{name} group {place}", group[1], match[1], tolerance)
    for names, _ in left:
        yield name, f"one more group in the second, of {_shown(names)}"


def _shown(names: frozenset[str]) -> str:
    listed = sorted(names)
    return ", ".join(map(repr, listed[:5])) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "") or "none"


def _differences(path: str, one: Any, other: Any, tolerance: float | None) -> Found:
    """Walk two pieces of simple JSON side by side."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}):
            name = f"{path}.{key}" if path else key
            if key not in one or key not in other:
                yield name, f"only in the {'second' if key not in one else 'first'}"
            else:
                yield from _differences(name, one[key], other[key], tolerance)
    elif isinstance(one, list) and isinstance(other, list):
        yield from _list_differences(path, one, other, tolerance)
    elif not _equal(one, other, tolerance):
        yield path, f"{_brief(one)} against {_brief(other)}"


def _list_differences(path: str, one: list[Any], other: list[Any], tolerance: float | None) -> Found:
    if len(one) != len(other):
        yield path, f"{len(one)} items against {len(other)}"
        return
    if any(isinstance(item, Mapping | list) for item in (*one, *other)):
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _differences(f"{path}.{place}", a, b, tolerance)
        return
    unlike = [place for place, (a, b) in enumerate(zip(one, other, strict=True)) if not _equal(a, b, tolerance)]
    if unlike:
        first = unlike[0]
        yield (
            path,
            f"{len(unlike)} of {len(one)} items differ, the first at {first}: {_brief(one[first])} against "
            f"{_brief(other[first])}",
        )


def _equal(one: Any, other: Any, tolerance: float | None) -> bool:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (one, other))
    if numbers and tolerance is not None:
        return bool(abs(one - other) <= tolerance * max(abs(one), abs(other)))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
