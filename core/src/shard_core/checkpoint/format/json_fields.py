"""JSON from a file that is not trusted, read field by field."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn, Self

from shard_core.errors import CheckpointCorrupted

#: What ``values.encode`` makes of the deepest value it takes, and a little more.
_MOST_LEVELS = 330


class Fields:
    """An object in a manifest, whose fields are returned only as what they must be.

    Args:
        content: What ``json.loads`` returned.
        owner: What it is part of, for messages.

    Raises:
        CheckpointCorrupted: If it is no object; every method, if a field is missing or not as it must be.

    Example:
        >>> Fields({"bytes": -1}, "a file").integer("bytes")
        Traceback (most recent call last):
        ...
        shard_core.errors.CheckpointCorrupted: 'bytes' of a file must be an integer of at least 0; it is -1.
    """

    def __init__(self, content: Any, owner: str) -> None:
        self._owner = owner
        if not isinstance(content, dict):
            raise CheckpointCorrupted(f"{owner} must be a JSON object; it is {shown(content)}.")
        self._content: dict[str, Any] = content

    @classmethod
    def from_json(cls, raw: bytes, owner: str) -> Self:
        """Parse an object, strictly: no field twice, no number that JSON does not know, no bottomless nesting.

        Args:
            raw: Its text.
            owner: What it is, for messages.

        Raises:
            CheckpointCorrupted: If it is no such text.
        """

        def refuse(constant: str) -> NoReturn:
            raise CheckpointCorrupted(f"{owner} holds {constant}, which is no JSON.")

        def unlike(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            fields = dict(pairs)
            if len(fields) < len(pairs):
                names = [name for name, _ in pairs]
                twice = next(name for name in names if names.count(name) > 1)
                raise CheckpointCorrupted(f"{owner} holds {shown(twice)} twice in one object.")
            return fields

        try:
            content = json.loads(raw, object_pairs_hook=unlike, parse_constant=refuse)
        except (ValueError, RecursionError) as error:
            raise CheckpointCorrupted(f"{owner} is no JSON that can be read: {error}.") from error
        if _is_deeper(content, _MOST_LEVELS):
            raise CheckpointCorrupted(f"{owner} is nested more than {_MOST_LEVELS} levels deep.")
        return cls(content, owner)

    def __contains__(self, name: str) -> bool:
        return name in self._content

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        """Return a string, all of which the pattern must match."""
        value = self._take(name)
        if not isinstance(value, str) or (pattern and not pattern.fullmatch(value)):
            self._refuse(name, "a string" + (f" like {pattern.pattern}" if pattern else ""), value)
        return str(value)

    def integer(self, name: str, least: int = 0) -> int:
        """Return an integer."""
        value = self._take(name)
        if type(value) is not int or not least <= value < 2**63:
            self._refuse(name, f"an integer of at least {least}", value)
        return int(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """Return an object as it is."""
        value = self._take(name)
        if not isinstance(value, dict):
            self._refuse(name, "an object", value)
        return dict(value)

    def items(self, name: str) -> list[Any]:
        """Return a list as it is."""
        value = self._take(name)
        if not isinstance(value, list):
            self._refuse(name, "a list", value)
        return list(value)

    def texts(self, name: str) -> dict[str, str]:
        """Return an object whose fields are strings."""
        fields = self.object(name)
        return {key: fields.text(key) for key in self.mapping(name)}

    def object(self, name: str) -> Fields:
        """Return an object as ``Fields``."""
        return Fields(self._take(name), f"{name!r} of {self._owner}")

    def listed(self, name: str) -> list[Fields]:
        """Return a list of objects as ``Fields``."""
        return [Fields(value, f"an item in {name!r} of {self._owner}") for value in self.items(name)]

    def _take(self, name: str) -> Any:
        if name not in self._content:
            raise CheckpointCorrupted(f"{self._owner} lacks {name!r}.")
        return self._content[name]

    def _refuse(self, name: str, wanted: str, value: Any) -> None:
        raise CheckpointCorrupted(f"{name!r} of {self._owner} must be {wanted}; it is {shown(value)}.")


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether JSON is nested more deeply; walks level by level, since recursion is what it guards."""
    level = [value]
    for _ in range(levels):
        level = [
            item
            for each in level
            if isinstance(each, dict | list)
            for item in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def shown(value: Any) -> str:
    """Return a value's ``repr``, of what is long only the beginning."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
