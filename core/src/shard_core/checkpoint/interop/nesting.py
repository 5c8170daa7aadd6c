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
    """Return the names of what is in a file, or in the state dict of it that the user has chosen.

    Args:
        entries: All that is in the file: tensors, and in words what is none.
        key: Which state dict, its keys joined by dots; None for a file that is one state dict and nothing else.
        path: The file, for messages.

    Returns:
        Where each is, by its further keys joined by dots.

    Raises:
        InvalidOption: Listing the state dicts, if one must be chosen or there is none of this key.
        CheckpointCorrupted: If two have one name.
    """
    tensors = [place for place, entry in entries.items() if not isinstance(entry, str)]
    if key is None:
        if any(len(place) > 1 for place in tensors):
            raise InvalidOption(f"{str(path)!r} holds its tensors under keys; {_choices(tensors)}")
        return _joined({place: place for place in entries}, path)
    inside = {place: rest for place in entries if (rest := _below(key, place)) is not None}
    if not inside:
        inner = _state_dicts(tensors)
        advice = f"To choose, {_choices(tensors)}" if inner else "All that it holds is one state dict, leave key out."
        hint = nearest(key, inner) or "."
        raise InvalidOption(f"{str(path)!r} holds nothing under key={key!r}{hint} {advice}")
    return _joined(inside, path)


def _below(key: str, place: Place) -> Place | None:
    """Return what is left of a place below a key; None if it is elsewhere."""
    return next((place[depth:] for depth in range(1, len(place)) if ".".join(place[:depth]) == key), None)


def _joined(places: Mapping[Place, Place], path: Path) -> dict[str, Place]:
    named: dict[str, Place] = {}
    for place, rest in places.items():
        if named.setdefault(".".join(rest), place) != place:
            raise CheckpointCorrupted(f"{str(path)!r} holds two things called {'.'.join(rest)!r}.")
    return named


def _state_dicts(tensors: Collection[Place]) -> dict[str, int]:
    """Count the tensors in each state dict, at the first level that has several."""
    depth = 1
    while True:
        counts: dict[str, int] = {}
        for place in tensors:
            if len(place) > depth:
                counts[".".join(place[:depth])] = counts.get(".".join(place[:depth]), 0) + 1
        # What leads to one key alone is no choice, unless that is the state dict.
        if len(counts) != 1 or any(len(place) <= depth + 1 for place in tensors):
            return counts
        depth += 1


def _choices(tensors: Collection[Place]) -> str:
    counts = _state_dicts(tensors).items()
    shown = [f"{name!r} ({count} {'tensor' if count == 1 else 'tensors'})" for name, count in counts]
    more = f" and {len(shown) - _LISTED} more" if len(shown) > _LISTED else ""
    return f"say which with key=...: {', '.join(shown[:_LISTED])}{more}."
