"""Background tasks that wait for a disk or a store rather than compute."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Tasks:
    """Runs each task in a thread of its own, from when it is begun.

    Example:
        >>> done = []
        >>> tasks = Tasks()
        >>> tasks.begin(lambda: done.append("file"))
        >>> tasks.wait()
        >>> done
        ['file']
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    @property
    def busy(self) -> bool:
        """Whether a task is not done yet."""
        return any(thread.is_alive() for thread in self._threads)

    def begin(self, task: Callable[[], None]) -> None:
        """Start a task; what it raises, ``wait`` raises."""

        def run() -> None:
            try:
                task()
            except BaseException as error:  # noqa: BLE001 - whoever waits raises it
                self._failures.append(error)

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=run, name="shard-write", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # a process that is about to exit may start none
            run()
        else:
            self._threads.append(thread)

    def wait(self) -> None:
        """Wait for all tasks, then raise what one of them raised, if any did."""
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]
