"""The last step of a run: destroy torch's process group so that the interpreter exits without an abort.

A rank that talks over gloo could die at interpreter exit with "terminate called without an active
exception" (SIGABRT). What it was (torch 2.13, CPython 3.11, seen in core dumps): a collective is finished
for the thread that waits for it before gloo's worker thread has let go of it. Letting go drops Python
objects (the tensors' wrappers, thread-local state of backward), for which the worker takes the
interpreter's lock. Where the worker is late, because it lost its core the moment it woke the main thread,
the main thread can be in ``Py_FinalizeEx`` by then; CPython ends any other thread that asks for the lock
there by ``pthread_exit``, the unwinding meets a destructor that may not throw, and C++ terminates.
``destroy_process_group`` does not prevent it while anything still holds the group, and a wrapped module,
its parameters and its mesh do: the workers live on.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import threading
import time

# A late worker needs one turn on a core and one on the interpreter's lock, a few scheduler slices. Many short
# naps, not a long one: in a container out of its CPU quota a nap can pass while no thread may run.
_NAPS, _NAP_SECONDS = 10, 0.01
#: NCCL can wait for threads of its own that other ranks keep, in an abort, too.
_ABORT_SECONDS = 10.0


def close_process_group() -> None:
    """Destroy torch's process groups and let their worker threads finish while Python still runs.

    Modules that nobody holds any more are collected first, so that destroying the groups joins the
    workers. Workers of a group that somebody still holds get the interpreter's lock and a moment to
    let go of their last collective. Nothing here waits for another rank.
    """
    import torch.distributed as dist

    from shard_core._versions import forget_layouts

    if not (dist.is_available() and dist.is_initialized()):
        return
    gc.collect()
    dist.destroy_process_group()
    forget_layouts()
    _settle()
    atexit.unregister(_settle)


def abort_process_groups() -> None:
    """Leave torch's process groups as a rank does that ends by an error, while others may still wait for it.

    NCCL's groups are destroyed by all ranks together, so destroying them would wait for those that are in a collective,
    and these wait for this rank. An abort gives up what is under way, and the others' fails; where it takes long, the
    error that this rank ends by does not wait for it.
    """
    from shard_core._versions import abort_groups, forget_layouts

    def abort() -> None:
        with contextlib.suppress(RuntimeError):  # the first error is the one to be shown
            abort_groups()

    thread = threading.Thread(target=abort, name="shard-abort", daemon=True)
    thread.start()
    thread.join(_ABORT_SECONDS)
    if not thread.is_alive():
        forget_layouts()
        atexit.unregister(_settle)


def settle_at_exit() -> None:
    """Register a wait for worker threads before the interpreter shuts down, if nothing closes the group.

    Call it where the process group is made: a script may end without ``teardown``.
    """
    atexit.unregister(_settle)
    atexit.register(_settle)


def _settle() -> None:
    """Release the interpreter's lock to worker threads that still hold a finished collective."""
    gc.collect()
    for _ in range(_NAPS):
        time.sleep(_NAP_SECONDS)
