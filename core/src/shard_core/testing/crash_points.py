"""Every point at which a process that writes files could be killed: what would be left, or the kill itself."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

#: Audit events of the interpreter that come right before names or lengths of files change.
_CHANGES = frozenset(
    {"os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate", "shutil.rmtree"}
)
_WRITES = os.O_WRONLY | os.O_RDWR

Listing = dict[str, tuple[int, int, int]]


class CrashPoints:
    """Copies a folder each time a process is about to change something in it.

    A process that is killed leaves what its file operations before that point made, so each copy is
    what a kill there would leave. Where a file is about to be opened for writing there is a second copy in
    which it is open and empty. Whoever opens files does so under the interpreter's own audit events, whatever
    library it uses; only code that bypasses the interpreter is not seen.

    Args:
        folder: What is watched.
        copies: An empty folder for the copies.

    Attributes:
        left: The copies, in the order they were made.
        changes: How many operations were about to change something.
    """

    def __init__(self, folder: Path, copies: Path) -> None:
        self._folder = folder
        self._copies = copies
        self._seen: Listing | None = None
        self.left: list[Path] = []
        self.changes = 0

    def before(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Record an operation that is about to happen."""
        self.changes += 1
        self.copy()
        opened = _opened(event, arguments, self._folder)
        if opened is not None and opened.parent.is_dir() and (arguments[2] & os.O_TRUNC or not opened.exists()):
            (self._make_copy() / opened.relative_to(self._folder)).write_bytes(b"")

    def copy(self) -> None:
        """Copy the folder as it is, if it is not as it was the last time."""
        if self._seen is None or _listing(self._folder) != self._seen:
            self._make_copy()

    def _make_copy(self) -> Path:
        target = self._copies / f"{len(self.left):03}"
        while True:
            self._seen = _listing(self._folder)
            # Other ranks may be writing; they soon wait for this one, and then the folder holds still.
            with suppress(OSError, shutil.Error):
                shutil.copytree(self._folder, target)
                if _listing(self._folder) == self._seen:
                    break
            shutil.rmtree(target, ignore_errors=True)
        self.left.append(target)
        return target


@contextmanager
def crash_points(folder: Path, copies: Path) -> Iterator[CrashPoints]:
    """Record the file operations on a folder while a block runs.

    Args:
        folder: What is watched; it must be there.
        copies: An empty folder for the copies.

    Yields:
        What was found; complete after the block.
    """
    watch = CrashPoints(folder, copies)
    with _recorded(watch.before, folder):
        yield watch
    watch.copy()


@contextmanager
def crash(folder: Path, change: int) -> Iterator[None]:
    """Kill this process at one of the operations in a block that change something in a folder.

    Args:
        folder: What is watched; it must be there.
        change: Which, counting from 1.
    """
    count = 0

    def tick(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == change:
            os.kill(os.getpid(), signal.SIGKILL)

    with _recorded(tick, folder):
        yield


@contextmanager
def _recorded(listener: Callable[[str, tuple[Any, ...]], None], folder: Path) -> Iterator[None]:
    hook = _audit_hook()
    hook.listener, hook.folder = listener, folder
    try:
        yield
    finally:
        hook.listener = None


class _AuditHook:
    """The one audit hook of this process; it can never be removed, only switched off."""

    def __init__(self) -> None:
        self.listener: Callable[[str, tuple[Any, ...]], None] | None = None
        self.folder = Path()
        self._at_it = threading.Lock()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Report the events that change files."""
        listener = self.listener
        if listener is None or not (event in _CHANGES or _opened(event, arguments, self.folder)):
            return
        if self._at_it.acquire(blocking=False):  # copying files makes the same events
            try:
                listener(event, arguments)
            finally:
                self._at_it.release()


@functools.cache
def _audit_hook() -> _AuditHook:
    hook = _AuditHook()
    sys.addaudithook(hook)
    return hook


def _opened(event: str, arguments: tuple[Any, ...], folder: Path) -> Path | None:
    """Return the file in a folder that is about to be opened to be written anew, if that is what an event is."""
    if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
        return None
    flags = arguments[2]
    if not isinstance(flags, int) or not flags & _WRITES or not flags & (os.O_CREAT | os.O_TRUNC):
        return None
    path = Path(os.path.abspath(os.fsdecode(arguments[0])))
    return path if path.is_relative_to(folder) else None


def _listing(folder: Path) -> Listing:
    """Describe what is in a folder so that any change shows."""
    found: Listing = {}
    for parent, _, names in os.walk(folder):
        found[parent] = (0, 0, 0)
        for name in names:
            path = os.path.join(parent, name)
            with suppress(FileNotFoundError):
                about = os.lstat(path)
                found[path] = (about.st_ino, about.st_size, about.st_mtime_ns)
    return found
