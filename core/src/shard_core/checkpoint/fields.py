"""JSON that somebody else wrote, read field by field."""

from __future__ import annotations

import re
from typing import Any

from shard_core.errors import CheckpointCorrupted


class Fields:
    """An object in a manifest, whose fields are taken out only as what they must be.

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
            raise CheckpointCorrupted(f"{owner} must be a JSON object; it is {_shown(content)}.")
        self._content: dict[str, Any] = content

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        """Take out a string, all of which the pattern must match."""
        value = self._take(name)
        if not isinstance(value, str) or (pattern and not pattern.fullmatch(value)):
            self._refuse(name, "a string" + (f" like {pattern.pattern}" if pattern else ""), value)
        return str(value)

    def integer(self, name: str, least: int = 0) -> int:
        """Take out an integer."""
        value = self._take(name)
        if type(value) is not int or not least <= value < 2**63:
            self._refuse(name, f"an integer of at least {least}", value)
        return int(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """Take out an object as it is."""
        value = self._take(name)
        if not isinstance(value, dict):
            self._refuse(name, "an object", value)
        return dict(value)

    def items(self, name: str) -> list[Any]:
        """Take out a list as it is."""
        value = self._take(name)
        if not isinstance(value, list):
            self._refuse(name, "a list", value)
        return list(value)

    def texts(self, name: str) -> dict[str, str]:
        """Take out an object whose fields are strings."""
        fields = self.object(name)
        return {key: fields.text(key) for key in self.mapping(name)}

    def object(self, name: str) -> Fields:
        """Take out an object to read on in."""
        return Fields(self._take(name), f"{name!r} of {self._owner}")

    def listed(self, name: str) -> list[Fields]:
        """Take out a list of objects to read on in."""
        return [Fields(value, f"an item in {name!r} of {self._owner}") for value in self.items(name)]

    def _take(self, name: str) -> Any:
        if name not in self._content:
            raise CheckpointCorrupted(f"{self._owner} lacks {name!r}.")
        return self._content[name]

    def _refuse(self, name: str, wanted: str, value: Any) -> None:
        raise CheckpointCorrupted(f"{name!r} of {self._owner} must be {wanted}; it is {_shown(value)}.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
