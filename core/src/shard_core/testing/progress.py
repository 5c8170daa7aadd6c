"""The sign of life of a long run: a bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LINES = 10


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show how far a run has come, past pytest, which captures standard error while tests run.

    Args:
        what: What is done, and which one is named, such as ``"cases judged, next"``.

    Yields:
        What is called with the name of one, how many are done, and how many there are.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with os.fdopen(os.dup(sys.stderr.fileno()), "w") as terminal:
        console = Console(file=terminal)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("starting", total=None)

            def on_step(name: str, done: int, total: int) -> None:
                bar.update(task, description=name, completed=done, total=total)
                # In a log, where no bar can move, a line now and then is the sign of life.
                if bar.disable and done > 0 and (done * _LINES) // total > ((done - 1) * _LINES) // total:
                    print(f"{done} of {total} {what}: {name}", file=terminal, flush=True)

            yield on_step
