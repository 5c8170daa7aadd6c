"""The launcher that starts nothing: this process is already the rank it should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shard_core.launcher.interface import Launcher


class CurrentProcessLauncher(Launcher):
    """Calls the function here: in one of the ranks that exist, or in a world of one.

    Example:
        >>> CurrentProcessLauncher().launch(max, 1, 3)
        3
    """

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` and return its result; nothing needs to travel.

        Args:
            function: Any callable.
            args: Its arguments.

        Returns:
            What this process's call returned.
        """
        return function(*args)
