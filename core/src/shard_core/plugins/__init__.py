"""A backend's card and config, and finding strategies by name; reaches no torch.

What a backend's ``plugin.py`` and ``config.py`` import besides the users' ``shard_core``, from which errors come.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from shard_core.capability import Capability
from shard_core.errors import nearest
from shard_core.mesh import DATA_AXIS, MeshShape, arranged
from shard_core.options import Option, option, options_of
from shard_core.plugins.discovery import Offer
from shard_core.plugins.hooks import hookimpl
from shard_core.plugins.info import StrategyInfo
from shard_core.plugins.manager import Installed, Plugins
from shard_core.plugins.references import load_object
from shard_core.plugins.seen import Seen, seen_on, seen_strategies, where_seen
from shard_core.plugins.shared_config import FullyShardOptions, LayerOptions, refuse_other_values
from shard_core.plugins.signatures import check_signature
from shard_core.precision.interface import PrecisionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DATA_AXIS",
    "Capability",
    "FullyShardOptions",
    "Installed",
    "LayerOptions",
    "MeshShape",
    "Offer",
    "Option",
    "Plugins",
    "PrecisionPolicy",
    "Seen",
    "StrategyInfo",
    "arranged",
    "check_signature",
    "find",
    "find_precision",
    "hookimpl",
    "installed",
    "load_object",
    "nearest",
    "option",
    "options_of",
    "plugins",
    "precision_names",
    "refuse_other_values",
    "seen_on",
    "seen_strategies",
    "where_seen",
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
