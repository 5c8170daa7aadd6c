"""What the verbs over checkpoints are given: paths that must name one, and sizes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import click

from shard_core.errors import CheckpointNotFound

#: The exit status where what was looked at is not as it should be.
FOUND_WANTING = 1

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


class Unusable(click.ClickException):
    """The arguments name nothing that can be looked after."""

    exit_code = 2


@contextlib.contextmanager
def naming_a_checkpoint() -> Iterator[None]:
    """Turn errors about paths that name no checkpoint into one sentence and exit status 2."""
    try:
        yield
    except (CheckpointNotFound, PermissionError) as error:
        raise Unusable(str(error)) from error


class Size(click.ParamType[int]):
    """A number of bytes as people write it: ``5GB`` is 5,000,000,000, ``5GiB`` is 5 times 2 to the 30th.

    Example:
        >>> Size().convert("1.5kB", None, None), Size().convert("2MiB", None, None)
        (1500, 2097152)
    """

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read it."""
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no size; write it like 5GB or 500MiB.", param, ctx)
        number, unit, binary = found.groups()
        return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
