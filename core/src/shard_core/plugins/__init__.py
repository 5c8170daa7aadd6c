"""Finding strategies by name, and what a backend's ``plugin.py`` needs; reaches no torch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from shard_core.plugins.hooks import hookimpl
from shard_core.plugins.info import StrategyInfo
from shard_core.plugins.manager import Installed, Plugins
from shard_core.plugins.references import load_object

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Installed",
    "Plugins",
    "StrategyInfo",
    "find",
    "find_precision",
    "hookimpl",
    "installed",
    "load_object",
    "plugins",
    "precision_names",
]


@functools.cache
def plugins() -> Plugins:
    """Return the finder that looks at the installed distributions."""
    return Plugins()


def find(name: str) -> StrategyInfo:
    """Return what the installed backend says about a strategy; see ``Plugins.find``.

    Example:
        >>> find("ddp").devices
        ('cpu', 'cuda')
    """
    return plugins().find(name)


def installed() -> tuple[Installed, ...]:
    """List the strategies that installed distributions offer; see ``Plugins.installed``."""
    return plugins().installed()


def find_precision(name: str) -> Callable[[], Any] | None:
    """Import a third party's precision; see ``Plugins.find_precision``."""
    return plugins().find_precision(name)


def precision_names() -> tuple[str, ...]:
    """List the precisions of third parties; see ``Plugins.precision_names``."""
    return plugins().precision_names()
