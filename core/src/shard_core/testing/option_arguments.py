"""``key=value`` as people type it after ``--option``."""

from __future__ import annotations

import ast
import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shard_core.options import Option


class Assignment(click.ParamType[tuple[str, str]]):
    """A key and the text after its equals sign.

    Example:
        >>> Assignment().convert("unit_size=1e6", None, None)
        ('unit_size', '1e6')
    """

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Split at the first equals sign."""
        if isinstance(value, tuple):
            return value
        key, equals, text = value.partition("=")
        if not equals or not key.isidentifier():
            self.fail(f"{value!r} is no assignment; write key=value, such as find_unused_parameters=True", param, ctx)
        return key, text


def values_of(assignments: Iterable[tuple[str, str]], options: Sequence[Option]) -> dict[str, Any]:
    """Read texts as JSON or Python values, as far as they are some and the option is not a text.

    Args:
        assignments: Keys and texts.
        options: What the strategy takes, to know which of them are texts.

    Returns:
        Keyword arguments for ``get_strategy``.

    Example:
        >>> values_of([("bucket_cap_mb", "25"), ("process_group_backend", "gloo")], [])
        {'bucket_cap_mb': 25, 'process_group_backend': 'gloo'}
        >>> values_of([("static_graph", "true"), ("broadcast_buffers", "False")], [])
        {'static_graph': True, 'broadcast_buffers': False}
    """
    texts = {option.name for option in options if option.type == "str"}
    return {key: text if key in texts else _value(text) for key, text in assignments}


def _value(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text
