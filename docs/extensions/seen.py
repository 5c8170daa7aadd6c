"""Writes on the pages of backends where each strategy was seen to run, from the record that is installed with core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shard_core.plugins import seen_strategies, where_seen

if TYPE_CHECKING:
    from sphinx.application import Sphinx

FOLDER, INDEX, CORE = "backends/", "index", "built-in"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", append)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def append(_app: Sphinx, page: str, source: list[str]) -> None:
    """Append a table to what is written by hand, on a backend's page of its own strategies."""
    if page.startswith(FOLDER):
        source[0] = "\n".join([source[0], *table(page.removeprefix(FOLDER))])


def table(page: str) -> Iterator[str]:
    """Write a row for each strategy that a page is about."""
    package = "shard-core" if page == CORE else f"shard-{page}"
    rows = [each for each in seen_strategies() if page == INDEX or each.package == package]
    if rows:
        yield "\n## Where it was seen to run\n\nThere it kept every promise that it was held to.\n"
        yield "| strategy | seen on |\n|---|---|"
        yield from (f"| `{each.name}` | {where_seen(each.on)} |" for each in rows)
