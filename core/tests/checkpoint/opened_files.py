"""Which files this process opens, as the interpreter itself reports it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

_listening: list[set[str]] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if not _listening or event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    path = os.fsdecode(arguments[0])
    if not path.endswith((".py", ".pyc", ".so")):  # libraries import as they go
        for opened in _listening:
            opened.add(path)


sys.addaudithook(_note)  # it cannot be taken away again, so there is one for all tests


@contextlib.contextmanager
def opened_files() -> Iterator[set[str]]:
    """Collect the paths of what is opened inside."""
    opened: set[str] = set()
    _listening.append(opened)
    try:
        yield opened
    finally:
        _listening.remove(opened)
