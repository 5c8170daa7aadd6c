"""Signs of life on standard error: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import click

_SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def progress(doing: str, format_amount: Callable[[float], str]) -> Iterator[Callable[[int, int], None]]:
    """Show how far something has come.

    Args:
        doing: What is being done.
        format_amount: Formats an amount.

    Yields:
        A function to call with what is done and what there is to do.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(doing, format_amount)
        return
    columns = (TextColumn(doing), BarColumn(), TextColumn("{task.fields[amount]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(doing, total=None, amount="")
        yield lambda done, total: bar.update(
            task, completed=done, total=total, amount=f"{format_amount(done)} of {format_amount(total)}", refresh=False
        )


def _lines(doing: str, format_amount: Callable[[float], str]) -> Callable[[int, int], None]:
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            click.echo(f"{doing}: {format_amount(done)} of {format_amount(total)}", err=True)

    return report
