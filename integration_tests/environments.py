"""Environments of their own for packages from outside the repository, on top of the one that runs the tests."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ("-m", "shard_core", "list", "--json")
SETTINGS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class Environment:
    """A virtual environment that sees what is installed here; what it installs is seen by nobody else.

    Args:
        home: Where it is to stand.
    """

    def __init__(self, home: Path) -> None:
        venv.create(home)
        self._python = str(home / "bin" / "python")
        places = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(home)}))
        # Unlike a mere path, this also reads the .pth files there, which lead to core and to torch.
        below = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
        (places / "below.pth").write_text(f"{below}\n")

    def python(
        self, *arguments: str, folder: Path, sources: Path | None = None, timeout: float = 280
    ) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python in a folder; ``sources`` come before what is installed."""
        settings = SETTINGS | ({"PYTHONPATH": str(sources)} if sources else {})
        return run(folder, self._python, *arguments, settings=settings, timeout=timeout)

    def install(self, wheel: Path) -> None:
        """Install a wheel whose requirements are all there."""
        self._pip("install", "--no-index", str(wheel))

    def uninstall(self, distribution: str) -> None:
        """Remove a distribution."""
        self._pip("uninstall", "--yes", distribution)

    def _pip(self, *arguments: str) -> None:
        pip = (sys.executable, "-m", "pip", "--python", self._python, "-q", "--disable-pip-version-check")
        succeed(run(ROOT, *pip, *arguments))


@functools.cache
def python_with(strategy: str) -> Path:
    """Find the interpreter of the environment that has a strategy, among those that nox lists."""
    pythons = [Path(text) for text in os.environ.get("SHARD_PYTHONS", sys.executable).split(os.pathsep)]
    for python in pythons:
        if any(row["name"] == strategy for row in json.loads(succeed(run(ROOT, str(python), *LIST)))):
            return python
    raise LookupError(f"none of {pythons} has {strategy!r}; run these tests by python3 noxfile.py -s integration")


def build_wheel(project: Path, home: Path) -> Path:
    """Build a project's wheel with the tools that are here."""
    command = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(home), str(project))
    succeed(run(ROOT, *command))
    (wheel,) = home.glob("*.whl")
    return wheel


def run(
    folder: Path, *command: str, settings: dict[str, str] | None = None, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and keep what it prints."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SHARD_", "PYTHON"))}
    environment |= settings or {}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)


def succeed(result: subprocess.CompletedProcess[str]) -> str:
    """Return what a command printed; it must have succeeded."""
    assert result.returncode == 0, f"{result.args}\n{result.stdout}{result.stderr}"
    return result.stdout
