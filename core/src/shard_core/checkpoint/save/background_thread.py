"""Tasks of all ranks that run behind training, each in a thread with a line of its own to the other ranks."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from shard_core.coordinator import Coordinator


def run_in_background(
    coordinator: Coordinator, task: Callable[[Coordinator], None], outcome: Future[None], *, name: str
) -> None:
    """Start a task in a thread; every rank calls this at the same point.

    The interpreter waits for the thread before it exits.

    Args:
        coordinator: How ranks talk in this thread.
        task: Is handed how they talk in the other.
        outcome: Is told when the task has returned, or what it raised.
        name: The thread's.

    Raises:
        MissingCapability: If the ranks can talk in no other thread.
    """
    line = contextlib.ExitStack()
    # Entered here: a process that is about to exit may start no further threads, and a line may need one.
    others = line.enter_context(coordinator.side_channel())

    def run() -> None:
        try:
            with line:
                task(others)
        except BaseException as error:  # noqa: BLE001 - whoever looks at the outcome raises it
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    try:
        threading.Thread(target=run, name=name, daemon=False).start()
    except RuntimeError:
        line.close()
        raise
