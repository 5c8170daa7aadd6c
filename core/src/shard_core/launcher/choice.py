"""Which launcher brings up the ranks that were asked for: torch's agent, or none where this process is one already."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shard_core.launcher.elastic import ElasticLauncher
from shard_core.launcher.interface import Launcher

if TYPE_CHECKING:
    from shard_core.launcher.interface import ProcessInfo


def choose_launcher(devices: int, process: ProcessInfo | None) -> Launcher:
    """Choose a launcher: for ranks that exist, for local ones to be started, or for this process alone.

    Args:
        devices: How many ranks this host should have.
        process: This process's place among ranks that exist.

    Returns:
        The launcher.

    Example:
        >>> type(choose_launcher(1, None)).__name__, type(choose_launcher(2, None)).__name__
        ('CurrentProcessLauncher', 'ElasticLauncher')
    """
    if process is not None or devices == 1:
        return CurrentProcessLauncher()
    return ElasticLauncher(num_processes=devices)


class CurrentProcessLauncher(Launcher):
    """Calls the function here: in one of the ranks that exist, or in a world of one.

    Example:
        >>> CurrentProcessLauncher().launch(max, 1, 3)
        3
    """

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` and return its result; nothing needs to be pickled.

        Args:
            function: Any callable.
            args: Its arguments.

        Returns:
            What this process's call returned.
        """
        return function(*args)
