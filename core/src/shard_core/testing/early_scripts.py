"""Scripts started before the promises about them are judged: they wait a lot, and others work meanwhile."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shard_core.testing.script import Outcome, PythonRun

if TYPE_CHECKING:
    from concurrent.futures import Future

_LONGEST_SECONDS = 180.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """A program and what it is told.

    Attributes:
        text: The program.
        launcher: What comes before it on the command line of the interpreter, ``-m`` and a module, say.
        arguments: What comes after it.
        pickled: What it finds beside itself as ``options.pickle``.
        environment: Variables added to this process's.
    """

    text: str
    launcher: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    pickled: bytes = b""
    environment: tuple[tuple[str, str], ...] = ()


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
                self._started[script] = run, self._threads.submit(_follow, run, folder)

    def result(self, script: Script) -> ScriptRun:
        """Wait for a script, which is started if it has not been, and tell how it ended."""
        self.start([script])
        return self._started[script][1].result()

    def close(self) -> None:
        """End the scripts that nobody has waited for."""
        for run, future in self._started.values():
            if not future.done():
                run.end()
        self._threads.shutdown()


def _start(script: Script, folder: Path) -> PythonRun:
    program = folder / "script.py"
    program.write_text(script.text)
    (folder / "options.pickle").write_bytes(script.pickled)
    return PythonRun([*script.launcher, str(program), *script.arguments], folder, dict(script.environment))


def _follow(run: PythonRun, folder: tempfile.TemporaryDirectory[str]) -> ScriptRun:
    with folder:
        outcome = run.outcome(_LONGEST_SECONDS)
        notes = {path.stem: json.loads(path.read_text()) for path in Path(folder.name).glob("*.json")}
    return ScriptRun(outcome=outcome, notes=notes)
