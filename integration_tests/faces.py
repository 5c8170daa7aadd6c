"""Checks that packages, their tests, docs and examples import core's faces and nothing behind them.

Run it with ``python integration_tests/faces.py``, as the session ``layers`` does.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FACES = ("shard_core", "shard_core.plugins", "shard_core.backend", "shard_core.checkpoint", "shard_core.testing")
#: What a backend's card and config may import: they are read where torch is not.
WITHOUT_TORCH = ("shard_core", "shard_core.plugins")
_IN_A_PAGE = re.compile(r"^[ +>-]*(?:from|import) (shard_core[\w.]*)", re.MULTILINE)


def imported(path: Path) -> Iterator[str]:
    """Yield the modules of core that a file imports from."""
    if path.suffix == ".md":
        yield from _IN_A_PAGE.findall(path.read_text())
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def behind_the_faces(root: Path) -> list[str]:
    """List the imports that go past a face.

    Args:
        root: The repository.
    """
    found = []
    for path in sorted([*root.glob("packages/**/*"), *root.glob("docs/**/*"), root / "README.md"]):
        inside = path.relative_to(root)
        if path.suffix not in (".py", ".md") or {"_build", "node_modules"} & set(inside.parts):
            continue
        card = "src" in inside.parts and (path.name in ("plugin.py", "config.py") or "config" in inside.parts)
        allowed = WITHOUT_TORCH if card else FACES
        for module in imported(path):
            if module.split(".")[0] == "shard_core" and module not in allowed:
                found.append(f"{inside} imports from {module}; it may import from: {', '.join(allowed)}.")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(behind_the_faces(ROOT)) or 0)
