"""What the verbs over checkpoints are given: paths that must name one, and sizes."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
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
    """Convert errors about paths that name no checkpoint into one sentence and exit status 2."""
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


class StorageOption(click.ParamType[tuple[str, Any]]):
    """An option of a store: its name, ``=``, and JSON where that is no number, else text.

    Example:
        >>> StorageOption().convert('anon=true', None, None), StorageOption().convert('key=0123', None, None)
        (('anon', True), ('key', '0123'))
    """

    name = "storage_option"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        """Read it."""
        key, equals, text = str(value).partition("=")
        if not key or not equals:
            self.fail(f"{value!r} is no option of a store; write it like KEY=VALUE.", param, ctx)
        try:
            read = json.loads(text)
        except ValueError:
            return key, text
        # The name of an account may be all digits.
        return key, text if type(read) in (int, float) else read


def _as_dict(_context: click.Context, _param: click.Parameter, pairs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return dict(pairs)


#: What every verb takes that may be given a URL.
storage_options: Callable[[Any], Any] = click.option(
    "--storage-option",
    "storage_options",
    type=StorageOption(),
    multiple=True,
    callback=_as_dict,
    metavar="KEY=VALUE",
    help="For the store a URL names, as fsspec takes it; may be given several times.",
)
