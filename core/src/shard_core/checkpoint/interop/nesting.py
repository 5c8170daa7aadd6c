"""Files that hold state dicts under keys: the names of the tensors in the one that was chosen."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shard_core.errors import CheckpointCorrupted, InvalidOption, nearest

if TYPE_CHECKING:
    from shard_core.checkpoint.interop.weights import Layout

#: The keys that lead to something, outermost first.
Place = tuple[str, ...]

_LISTED = 12


def choose(entries: Mapping[Place, Layout | str], key: str | None, path: Path) -> dict[str, Place]:
    """Name what is in a file, or in the part of it that the user has chosen.

    Args:
        entries: All that is in the file: tensors, and in words what is none.
        key: The part, its keys joined by dots; None for a file that is one state dict and nothing else.
        path: The file, for messages.

    Returns:
        Where each is, by its further keys joined by dots.

    Raises:
        InvalidOption: Listing the parts, if one must be chosen or there is none of this key.
        CheckpointCorrupted: If two have one name.
    """
    tensors = [place for place, entry in entries.items() if not isinstance(entry, str)]
    if key is None:
        if any(len(place) > 1 for place in tensors):
            raise InvalidOption(f"{str(path)!r} holds its tensors under keys; {_choices(tensors)}")
        return _joined({place: place for place in entries}, path)
    inside = {place: rest for place in entries if (rest := _below(key, place)) is not None}
    if not inside:
        parts = _parts(tensors)
        told = f"To choose, {_choices(tensors)}" if parts else "All that it holds is one state dict, leave key out."
        hint = nearest(key, parts) or "."
        raise InvalidOption(f"{str(path)!r} holds nothing under key={key!r}{hint} {told}")
    return _joined(inside, path)


def _below(key: str, place: Place) -> Place | None:
    """Give what is left of a place below a key; None if it is elsewhere."""
    return next((place[depth:] for depth in range(1, len(place)) if ".".join(place[:depth]) == key), None)


def _joined(places: Mapping[Place, Place], path: Path) -> dict[str, Place]:
    named: dict[str, Place] = {}
    for place, rest in places.items():
        if named.setdefault(".".join(rest), place) != place:
            raise CheckpointCorrupted(f"{str(path)!r} holds two things called {'.'.join(rest)!r}.")
    return named


def _parts(tensors: Collection[Place]) -> dict[str, int]:
    """Count the tensors in each part, where the parts first part."""
    depth = 1
    while True:
        parts: dict[str, int] = {}
        for place in tensors:
            if len(place) > depth:
                parts[".".join(place[:depth])] = parts.get(".".join(place[:depth]), 0) + 1
        # What leads to one part alone is no choice, unless that part is the state dict.
        if len(parts) != 1 or any(len(place) <= depth + 1 for place in tensors):
            return parts
        depth += 1


def _choices(tensors: Collection[Place]) -> str:
    counts = _parts(tensors).items()
    parts = [f"{part!r} ({count} {'tensor' if count == 1 else 'tensors'})" for part, count in counts]
    more = f" and {len(parts) - _LISTED} more" if len(parts) > _LISTED else ""
    return f"say which with key=...: {', '.join(parts[:_LISTED])}{more}."
