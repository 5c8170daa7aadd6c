"""Checks that packages, their tests, docs and examples import core's faces and nothing behind them.

Run it with ``python integration_tests/faces.py``, as the session ``layers`` does.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "core" / "src"
FACES = ("shard_core", "shard_core.plugins", "shard_core.backend", "shard_core.checkpoint", "shard_core.testing")
#: What a backend's card and config may import: they are read where torch is not.
WITHOUT_TORCH = ("shard_core", "shard_core.plugins")
_IN_A_PAGE = re.compile(r"^[ +>-]*((?:from|import) shard_core\b[^\n(]*(?:\([^)]*\))?)", re.MULTILINE)


@functools.cache
def names_of(face: str) -> frozenset[str]:
    """Return what a face exports, and the faces below it."""
    path = CORE.joinpath(*face.split("."))
    text = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    [exported] = [
        ast.literal_eval(node.value)
        for node in ast.parse(text.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return frozenset([*exported, *(other.removeprefix(f"{face}.") for other in FACES)])


def imports_of(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the modules that a file imports from, and the names it imports."""
    text = path.read_text()
    for piece in _IN_A_PAGE.findall(text) if path.suffix == ".md" else [text]:
        for node in ast.walk(ast.parse(piece)):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield node.module, tuple(each.name for each in node.names)
            elif isinstance(node, ast.Import):
                yield from ((each.name, ()) for each in node.names)


def behind_the_faces(root: Path) -> list[str]:
    """List the imports that go past a face.

    Args:
        root: The repository.
    """
    found = []
    for path in sorted([*root.glob("packages/**/*"), *root.glob("docs/**/*"), *root.glob("*.md")]):
        inside = path.relative_to(root)
        if path.suffix not in (".py", ".md") or "_build" in inside.parts:
            continue
        card = "src" in inside.parts and (path.name in ("plugin.py", "config.py") or "config" in inside.parts)
        allowed = WITHOUT_TORCH if card else FACES
        for module, names in imports_of(path):
            if module.split(".")[0] != "shard_core":
                continue
            if module not in allowed:
                found.append(f"{inside} imports from {module}; it may import from: {', '.join(allowed)}.")
            elif hidden := [name for name in names if name not in names_of(module)]:
                found.append(f"{inside} imports {', '.join(hidden)} from {module}; that is none of its names.")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(behind_the_faces(ROOT)) or 0)
