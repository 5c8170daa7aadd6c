"""Pickles read as data: what they would make is named, and stand-ins are made that do nothing."""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Mapping
from typing import Any

from shard_core.errors import CheckpointCorrupted


class Record:
    """Stands in for an object of a class that a pickle names, and keeps what the pickle holds of it.

    Attributes:
        kind: The name of that class.
        arguments: What it would have been made with.
        state: What it would have been given then.
    """

    kind = ""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load_inert(
    raw: bytes, owner: str, classes: Collection[tuple[str, str]], values: Mapping[tuple[str, str], Any]
) -> Any:
    """Decode a pickle without importing or calling anything that it names.

    Args:
        raw: The pickle.
        owner: What it is, for messages.
        classes: (module, name) of what a ``Record`` may stand in for.
        values: What stands for other (module, name), themselves harmless.

    Raises:
        CheckpointCorrupted: If it names anything else, or is no pickle.
    """
    try:
        return _Inert(raw, owner, classes, values).load()
    except CheckpointCorrupted:
        raise
    except Exception as error:  # damaged bytes may make it raise anything
        raise CheckpointCorrupted(f"{owner} is damaged: {type(error).__name__}: {error}.") from error


class _Inert(pickle.Unpickler):
    def __init__(
        self,
        raw: bytes,
        owner: str,
        classes: Collection[tuple[str, str]],
        values: Mapping[tuple[str, str], Any],
    ) -> None:
        super().__init__(io.BytesIO(raw))
        self._owner = owner
        self._values = values
        # Made anew for each pickle, so that none can leave anything behind in them.
        self._stands_for = {each: type("Record", (Record,), {"kind": each[1]}) for each in classes}

    def find_class(self, module: str, name: str) -> Any:
        found = (module, name)
        if found in self._stands_for:
            return self._stands_for[found]
        if found in self._values:
            return self._values[found]
        raise CheckpointCorrupted(
            f"{self._owner} names {module}.{name}, which has no place in it; it would execute arbitrary code where it "
            "is unpickled, and is not read."
        )
