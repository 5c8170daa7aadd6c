"""What runs in a process that ``ElasticLauncher`` started: the user's call, with its end reported."""

from __future__ import annotations

import atexit
import dataclasses
import multiprocessing
import multiprocessing.synchronize
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from shard_core.errors import ShardError
from shard_core.launcher.report import DONE, FAILED, REFUSED, STARTED, Report, read_report

# A rank that raises stays this long before it ends. So the launcher sees first a rank that died without
# a word, and not the others, which raise because its connection was lost.
LINGER_SECONDS = 0.5
# How long a rank that has finished stays for the others.
_STAY_SECONDS = 3.0
# How long a rank whose launcher is gone may use for its own clean-up.
_ORPHAN_SECONDS = 5.0
# The folder of the call that this process was started for, once it has begun.
_begun: list[str] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankCall:
    """A call on its way to the ranks.

    Attributes:
        folder: Where each rank reports.
        function: What to call.
        args: With what.
    """

    folder: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


def run_rank(call: RankCall) -> None:
    """Run the call on this rank and report how it ended.

    Args:
        call: The call.
    """
    threading.Thread(target=_leave_with_launcher, daemon=True).start()
    rank = int(os.environ["RANK"])
    Report(rank=rank, state=STARTED).write(call.folder)
    _begun.append(call.folder)
    try:
        result, how = _call(call)
    except KeyboardInterrupt:
        Report(rank=rank, state=FAILED, cause="was interrupted").write(call.folder)
        raise SystemExit(130) from None
    except BaseException as error:
        report_failure(error)
        time.sleep(LINGER_SECONDS)
        raise
    if rank == 0:
        _write_result(result, call.folder)
    Report(rank=rank, state=DONE, cause=how).write(call.folder)
    _leave_soon()


def report_failure(error: BaseException) -> None:
    """Report to the launcher that started this process, if one did, what has failed; the same error only once.

    To be called before anything is cleaned up: others raise when this rank's connections close, and must not be
    taken for the first.

    Args:
        error: What ended the user's function.
    """
    rank = int(os.environ.get("RANK", "0"))
    for folder in _begun:
        last = read_report(folder, rank)
        if last is None or last.state != FAILED or last.cause != _cause(error):
            sentence = str(error) if isinstance(error, ShardError) else None
            report = Report(rank=rank, state=FAILED, cause=_cause(error), detail=_detail(error), sentence=sentence)
            report.write(folder)


def read_result(folder: str) -> Any:
    """Read what rank 0 returned.

    Args:
        folder: The launch's own folder.

    Returns:
        A copy.
    """
    return pickle.loads(_result_path(folder).read_bytes())


def _result_path(folder: str) -> Path:
    return Path(folder, "result.pickle")


def _call(call: RankCall) -> tuple[Any, str]:
    """Return what the function returned, and how it left where it did not return."""
    try:
        return call.function(*call.args), ""
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            return None, _cause(leaving)
        raise


def _write_result(result: Any, folder: str) -> None:
    """Write rank 0's result to a file: a tensor in shared memory would die with its rank."""
    try:
        _result_path(folder).write_bytes(pickle.dumps(result))
    except Exception as error:
        kind = f"{type(result).__module__}.{type(result).__qualname__}".removeprefix("builtins.")
        cause = (
            f"rank 0 returned an object of type {kind}, which cannot be sent back ({error}); "
            "return plain values, tensors or state dicts."
        )
        Report(rank=0, state=REFUSED, cause=cause).write(folder)
        raise


def _cause(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})"
    return "".join(traceback.format_exception_only(error)).strip()


def _detail(error: BaseException) -> str:
    """Format the traceback from the user's function on; the frames above it are this module's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).strip()


def _leave_soon() -> None:
    """End this process in a moment, though torch's agent keeps it until all ranks have finished.

    Its connections close then, and a rank that waits for it in a collective fails instead of waiting on.
    """
    signal.signal(signal.SIGALRM, _leave)
    signal.setitimer(signal.ITIMER_REAL, _STAY_SECONDS, _STAY_SECONDS)
    # An interpreter that shuts down lets go of its handlers, and an alarm would kill it.
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit from what torch runs here after the call, once it only waits for the other ranks."""
    del number
    if frame is not None and frame.f_globals["__name__"] == multiprocessing.synchronize.__name__:
        sys.exit(0)


def _leave_with_launcher() -> None:
    """End this rank when its launcher is gone: it may hang in a collective that no signal ends."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    time.sleep(_ORPHAN_SECONDS)
    os._exit(1)
