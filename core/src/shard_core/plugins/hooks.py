"""The two questions core asks a backend; the whole extension surface on one page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from shard_core.plugins.info import StrategyInfo

#: The name under which hook specifications and implementations find one another.
PROJECT = "shard"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def shard_strategy(name: str) -> StrategyInfo | None:
    """Describe the strategy of this name as pure data, or return ``None`` if the name is not yours.

    Called while strategies are listed: import no torch, touch no device, nothing of the backend's library.

    Args:
        name: The entry point's name, the word the user typed.
    """


@hookspec(firstresult=True)
def shard_unavailable(name: str) -> str | None:
    """Return one sentence why the strategy cannot run here, or ``None`` if it can; optional.

    May look for a library or its version in installed metadata; imports and initialises nothing.

    Args:
        name: The entry point's name, the word the user typed.
    """
