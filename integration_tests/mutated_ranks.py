"""Ranks whose source is changed in memory, and ranks that note which lines they reach."""

from __future__ import annotations

import ast
import builtins
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

from shard_core.testing.processes.world import World

_OURS = "shard_"
_KEPT = ("shard_core.testing.processes",)
"""What a rank itself consists of: it goes on in the modules it was started from."""
_NOTE = "_note_reached"
"""The name under which modules that note find what does: a builtin, so that no import is put into them."""
_REACHED: set[tuple[str, int]] = set()


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
    """A world that notes which statements of some folders its ranks reach.

    Attributes:
        reached: Files and lines that statements of functions begin at, since it was last emptied.
    """

    def __init__(self, size: int, environment: dict[str, str], places: Sequence[str]) -> None:
        super().__init__(size, environment)
        self._places = tuple(places)
        self.reached: set[tuple[str, int]] = set()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call a function on every rank, of modules that note what they reach."""
        if not self._ranks:
            super().run(import_noting, self._places)
        answers = super().run(noted, function, *args, timeout=timeout)
        for _, lines in answers:
            self.reached.update(lines)
        return [value for value, _ in answers]


def import_anew(file: str, source: str) -> None:
    """Forget our modules and have one of them imported in another form."""
    _forget()
    sys.meta_path.insert(0, _Finder((file,), lambda _: source))


def import_noting(places: tuple[str, ...]) -> None:
    """Forget our modules and have those of ``places`` imported so that they note what they reach.

    Statements that note cost a tenth of what a trace function does, which is called for all of torch, too.
    """
    _forget()
    setattr(builtins, _NOTE, _REACHED.add)
    sys.meta_path.insert(0, _Finder(places, _noting))


def noted(function: Callable[..., Any], *args: Any) -> tuple[Any, list[tuple[str, int]]]:
    """Call a function and return what it does, with the files and lines that were reached."""
    _REACHED.clear()
    value = function(*args)
    return value, list(_REACHED)


def _forget() -> None:
    for name in [each for each in sys.modules if each.startswith(_OURS) and not each.startswith(_KEPT)]:
        del sys.modules[name]


class _Noting(ast.NodeTransformer):
    """Puts a note of its file and line before each statement of functions."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._inside = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outside, self._inside = self._inside, True
        self.generic_visit(node)
        self._inside = outside
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if self._inside and isinstance(block, list):  # that of a lambda is none
                setattr(node, field, [each for statement in block for each in (self._note(statement), statement)])
        return node

    def _note(self, statement: ast.stmt) -> ast.stmt:
        return ast.parse(f"{_NOTE}(({self._file!r}, {statement.lineno}))").body[0]


def _noting(file: str) -> ast.Module:
    module = ast.parse(Path(file).read_bytes())
    _Noting(file).visit(module)
    return ast.fix_missing_locations(module)


class _Finder(MetaPathFinder):
    def __init__(self, places: tuple[str, ...], form: Callable[[str], str | ast.Module]) -> None:
        self._places, self._form = places, form

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.startswith(_OURS) else None
        if spec is None or not (spec.origin or "").startswith(self._places):
            return None
        spec.loader = _Loader(name, str(spec.origin), self._form)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, file: str, form: Callable[[str], str | ast.Module]) -> None:
        super().__init__(name, file)
        self._form = form

    def get_code(self, fullname: str) -> types.CodeType:
        return compile(self._form(self.path), self.path, "exec")
