"""Strategies of backends that live in environments of their own: what they say reaches no library."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import tomllib
from pathlib import Path

from shard_core.plugins.manager import Installed

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [str(folder / "src") for folder in sorted(ROOT.glob("packages/shard-*"))]


def elsewhere() -> list[Installed]:
    """List the strategies of this repository's backends that are not installed here."""
    found = []
    for file in sorted(ROOT.glob("packages/shard-*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        if not _is_installed(project["name"]):
            for name, reference in project["entry-points"]["shard.strategies"].items():
                info = _plugin(file.parent / "src", reference).shard_strategy(name)
                owner = {"distribution": project["name"], "version": project["version"]}
                found.append(Installed(name=name, **owner, info=info, problem=None))
    return found


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _plugin(sources: Path, reference: str):
    sys.path.append(str(sources))
    try:
        return importlib.import_module(reference)
    finally:
        sys.path.remove(str(sources))
