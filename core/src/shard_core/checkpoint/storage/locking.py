"""A lock between processes, on whatever host, that the system releases when its holder dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from shard_core.errors import CheckpointError

#: The file of a folder that is locked; no file of a checkpoint.
LOCK_NAME = "save.lock"
#: Who holds it reads and renames a small file, or removes some: that takes long only on a disk that hangs.
_PATIENCE_SECONDS = 60.0
_PAUSE_SECONDS = 0.005
#: What file systems without locks answer.
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file, against all others that lock it; a file system that has no locks keeps out nobody.

    The file is there only while somebody holds the lock, or died holding it.

    Args:
        path: The file.

    Raises:
        CheckpointError: If somebody holds it for a minute.
        OSError: If it cannot be made.
    """
    descriptor = _acquire(path)
    try:
        yield
    finally:
        # Removed while it is held: whoever waits for it finds out, and makes another.
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):  # not left to close(): a child that was forked meanwhile has it open too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _acquire(path: Path) -> int:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        if _holds(descriptor, path):
            return descriptor
        os.close(descriptor)
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"another process has held {str(path)!r} for {_PATIENCE_SECONDS:.0f} seconds, which it does only to "
                "put a checkpoint in place or to remove one; end it, or save to another path."
            )
        time.sleep(_PAUSE_SECONDS)


def _holds(descriptor: int, path: Path) -> bool:
    """Try to take the lock of a file that was opened; its name may have gone to another file by now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            if error.errno == errno.ESTALE:
                return False
            raise
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
