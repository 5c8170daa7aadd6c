"""Scripts started before the promises about them are judged: they wait a lot, and others work meanwhile."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shard_core.testing.processes.script import Outcome, PythonRun

if TYPE_CHECKING:
    from concurrent.futures import Future

#: How long a script may take, or until one whose process is to die comes so far: only against hanging.
_LONGEST_SECONDS = 280.0
#: How often is looked whether a process is dead.
_LOOK_SECONDS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """A program and its arguments.

    Attributes:
        text: The program.
        launcher: What comes before it on the command line of the interpreter, ``-m`` and a module, say.
        arguments: What comes after it.
        pickled: What it finds beside itself as ``options.pickle``.
        environment: Variables added to this process's.
        dies: The name of a lock beside it that one of its processes holds until it dies; empty where none is to die.
        survives: How many seconds the script may go on after that, and as many more as it took to lock.
    """

    text: str
    launcher: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    pickled: bytes = b""
    environment: tuple[tuple[str, str], ...] = ()
    dies: str = ""
    survives: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptRun:
    """How a script ended, and what its processes noted on the way.

    Attributes:
        outcome: How it ended.
        notes: What is in the JSON files that it has left beside itself, by their names.
    """

    outcome: Outcome
    notes: Mapping[str, Any]


class EarlyScripts:
    """The scripts of a session: each runs once, all at the same time, and none outlives the session."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(thread_name_prefix="early-script")
        self._started: dict[Script, tuple[PythonRun, Future[ScriptRun]]] = {}

    def start(self, scripts: Iterable[Script]) -> None:
        """Start scripts that have not been started yet."""
        for script in scripts:
            if script not in self._started:
                folder = tempfile.TemporaryDirectory(prefix="shard-script-", ignore_cleanup_errors=True)
                run = _start(script, Path(folder.name))
                self._started[script] = run, self._threads.submit(_follow, run, script, folder)

    def result(self, script: Script) -> ScriptRun:
        """Wait for a script, which is started if it has not been, and return how it ended."""
        self.start([script])
        return self._started[script][1].result()

    def close(self) -> None:
        """Terminate the scripts that nobody has waited for."""
        for run, future in self._started.values():
            if not future.done():
                run.end()
        self._threads.shutdown()


def _start(script: Script, folder: Path) -> PythonRun:
    program = folder / "script.py"
    program.write_text(script.text)
    (folder / "options.pickle").write_bytes(script.pickled)
    return PythonRun([*script.launcher, str(program), *script.arguments], folder, dict(script.environment))


def _follow(run: PythonRun, script: Script, folder: tempfile.TemporaryDirectory[str]) -> ScriptRun:
    with folder:
        outcome = _outcome_after_crash(run, script, Path(folder.name)) if script.dies else run.outcome(_LONGEST_SECONDS)
        notes = {path.stem: json.loads(path.read_text()) for path in Path(folder.name).glob("*.json")}
    return ScriptRun(outcome=outcome, notes=notes)


def _outcome_after_crash(run: PythonRun, script: Script, folder: Path) -> Outcome:
    """Wait for a script whose time begins when one of its processes is killed, however long starting takes."""
    ended = threading.Event()
    watch = threading.Thread(target=_kill_after_crash, args=(run, script, folder / script.dies, ended), daemon=True)
    watch.start()
    try:
        return run.outcome(None)
    finally:
        ended.set()
        watch.join()


def _kill_after_crash(run: PythonRun, script: Script, lock: Path, ended: threading.Event) -> None:
    start = time.monotonic()
    if _comes_true(lock.exists, _LONGEST_SECONDS, ended):
        # A machine that was slow to start ranks is slow to end them.
        patience = script.survives + time.monotonic() - start
        _comes_true(lambda: _is_free(lock), patience, ended)
        ended.wait(patience)
    if not ended.is_set():
        run.end()


def _comes_true(happened: Callable[[], bool], seconds: float, ended: threading.Event) -> bool:
    deadline = time.monotonic() + seconds
    while not happened():
        if ended.wait(_LOOK_SECONDS) or time.monotonic() > deadline:
            return False
    return True


def _is_free(lock: Path) -> bool:
    """Return whether nobody holds a lock: the system frees that of a process that has died, whoever reaps it."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
