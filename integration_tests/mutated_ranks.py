"""Ranks whose source is changed in memory, and ranks that note which lines they reach."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

from shard_core.testing.processes.world import World

_OURS = "shard_"
_KEPT = ("shard_core.testing.processes",)
"""What a rank itself consists of: it goes on in the modules it was started from."""


class MutatedWorld(World):
    """A world whose ranks, however often they are replaced, import one file in another form.

    Args:
        size: How many ranks.
        environment: Variables they are started with.
        file: The file's path.
        source: What it holds instead.
    """

    def __init__(self, size: int, environment: dict[str, str], file: str, source: str) -> None:
        super().__init__(size, environment)
        self._mutation = file, source

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call a function on every rank, of modules imported anew if the ranks are."""
        if not self._ranks:
            super().run(import_anew, *self._mutation)
        return super().run(function, *args, timeout=timeout)


class TracedWorld(World):
    """A world that notes which lines of some folders its ranks reach.

    Attributes:
        reached: Files and lines, since it was last emptied.
    """

    def __init__(self, size: int, environment: dict[str, str], places: Sequence[str]) -> None:
        super().__init__(size, environment)
        self._places = tuple(places)
        self.reached: set[tuple[str, int]] = set()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call a function on every rank, which takes longer when traced."""
        answers = super().run(traced, self._places, function, *args, timeout=3 * timeout)
        for _, lines in answers:
            self.reached.update(lines)
        return [value for value, _ in answers]


def import_anew(file: str, source: str) -> None:
    """Forget our modules and have one of them imported in another form."""
    for name in [each for each in sys.modules if each.startswith(_OURS) and not each.startswith(_KEPT)]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder(file, source))


def traced(places: tuple[str, ...], function: Callable[..., Any], *args: Any) -> tuple[Any, list[tuple[str, int]]]:
    """Call a function and return what it does, with the lines of ``places`` that were reached."""
    lines: set[tuple[str, int]] = set()

    def on_line(frame: types.FrameType, event: str, argument: object) -> Any:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return on_line

    def on_call(frame: types.FrameType, event: str, argument: object) -> Any:
        return on_line(frame, event, argument) if frame.f_code.co_filename.startswith(places) else None

    threading.settrace(on_call)
    sys.settrace(on_call)
    try:
        value = function(*args)
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return value, list(lines)


class _Finder(MetaPathFinder):
    def __init__(self, file: str, source: str) -> None:
        self._file, self._source = file, source

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.startswith(_OURS) else None
        if spec is None or spec.origin != self._file:
            return None
        spec.loader = _Loader(name, self._file, self._source)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, file: str, source: str) -> None:
        super().__init__(name, file)
        self._source = source

    def get_code(self, fullname: str) -> types.CodeType:
        return compile(self._source, self.path, "exec")
