"""Real distributions for tests: folders with modules and metadata, as pip leaves them on ``sys.path``."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

STRATEGIES = "shard.strategies"
PRECISIONS = "shard.precisions"


class Site:
    """A folder on ``sys.path`` that distributions are installed into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self,
        name: str,
        *,
        version: str = "1.0.0",
        requires: tuple[str, ...] = (),
        entries: Mapping[str, Mapping[str, str]] | None = None,
        modules: Mapping[str, str] | None = None,
    ) -> Path:
        """Write a distribution's metadata and modules; return the folder of its metadata."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        header = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        header += [f"Requires-Dist: {line}" for line in requires]
        (info / "METADATA").write_text("\n".join([*header, ""]))
        words = []
        for group, references in (entries or {}).items():
            words += [f"[{group}]", *(f"{word} = {reference}" for word, reference in references.items())]
        (info / "entry_points.txt").write_text("\n".join([*words, ""]))
        for module, text in (modules or {}).items():
            (self.folder / f"{module}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return info


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Site, Site]]:
    """Return two sites, one before and one after what is installed; their modules are forgotten."""
    before, after = Site(tmp_path / "before"), Site(tmp_path / "after")
    for site in (before, after):
        site.folder.mkdir()
    # Undone as a whole, which an attribute set beside it would not be: a test may prepend other places.
    monkeypatch.syspath_prepend(str(before.folder))
    sys.path.append(str(after.folder))
    yield before, after
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def site(sites: tuple[Site, Site]) -> Site:
    """Return a site after everything that is installed."""
    return sites[1]
