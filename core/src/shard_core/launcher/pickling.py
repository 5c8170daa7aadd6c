"""What can be pickled for a new process, and one sentence for what cannot."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
from typing import Any

from shard_core.errors import LaunchError

#: How a new process ends that calls launch() while it still imports the script.
UNGUARDED_EXIT = 78

UNGUARDED = (
    "the script calls launch() as soon as it is imported, and every new rank imports it; "
    'put the call under `if __name__ == "__main__":`.'
)


def refuse_unguarded() -> None:
    """Exit at once if this process was started as a rank and is still importing the script.

    Raises:
        SystemExit: With ``UNGUARDED_EXIT``, which the launcher turns into a sentence; nothing is printed.
    """
    frame = inspect.currentframe()
    while frame is not None:
        # The name under which multiprocessing imports the main script into a new process.
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            raise SystemExit(UNGUARDED_EXIT)
        frame = frame.f_back


def check_importable(*objects: Any) -> None:
    """Refuse functions that a new process could not find by name.

    Args:
        objects: The function to launch and its arguments; other objects pass.

    Raises:
        LaunchError: If one is a lambda, is defined inside a function, or lives in a script that is no file.
    """
    main = sys.modules["__main__"]
    is_module = getattr(main, "__spec__", None) is not None
    file = getattr(main, "__file__", None)
    if not is_module and file is not None and not os.path.exists(file):
        raise LaunchError(
            f"ranks cannot be started from a script that is not a file ({file}), because every rank reads it "
            "again; save it and run `python script.py`."
        )
    for each in objects:
        function = each.func if isinstance(each, functools.partial) else each
        if not inspect.isroutine(function) and not inspect.isclass(function):
            continue
        name = getattr(function, "__qualname__", "")
        if "<lambda>" in name:
            raise LaunchError(
                "a lambda cannot be sent to new processes, neither to be launched nor as an argument; define a "
                "function at the top level of a module and give that."
            )
        if "<locals>" in name:
            raise LaunchError(
                f"{name.split('.')[-1]}() is defined inside {name.split('.<locals>')[0]}(), where new processes cannot "
                "find it; move it to the top level of its module, and pass what it needs as arguments to launch()."
            )
        if getattr(function, "__module__", None) == "__main__" and not is_module and file is None:
            raise LaunchError(
                f"{name}() was typed into a notebook, an interactive session or `python -c`, where new processes "
                "cannot find it; put it into a .py file and import it, or use devices=1."
            )


def check_picklable(*objects: Any) -> None:
    """Check that objects can be pickled; called only after starting a process failed.

    Args:
        objects: The function to launch and its arguments.

    Raises:
        LaunchError: If one cannot be pickled.
    """
    for each in objects:
        try:
            pickle.dumps(each)
        except Exception as error:
            what = f"{type(each).__module__}.{type(each).__qualname__}".removeprefix("builtins.")
            raise LaunchError(
                f"an argument of type {what} cannot be sent to new processes ({error}); pass plain values, and "
                "build the rest inside the launched function."
            ) from error
