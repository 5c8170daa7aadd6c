"""Shrunk programs that once failed, a JSON file each, named by what it is about; every campaign runs them first.

A file whose name begins with ``refused-`` holds a program that is refused for good; every other one is equal.
"""

from __future__ import annotations

import importlib.resources
from typing import TYPE_CHECKING

from shard_core.testing.programs.program import from_json

if TYPE_CHECKING:
    from shard_core.testing.programs.program import Program


def kept_programs() -> dict[str, Program]:
    """Read every kept program.

    Returns:
        By file name without its ending, sorted.

    Example:
        >>> kept_programs()["seed-again"].strategy
        'ddp'
    """
    files = [each for each in importlib.resources.files(__name__).iterdir() if each.name.endswith(".json")]
    return {each.name.removesuffix(".json"): from_json(each.read_text()) for each in sorted(files, key=str)}
