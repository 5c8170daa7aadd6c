"""Which launcher brings up the ranks that were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_core.launcher.current import CurrentProcessLauncher
from shard_core.launcher.elastic import ElasticLauncher

if TYPE_CHECKING:
    from shard_core.launcher.interface import Launcher, ProcessInfo


def choose_launcher(devices: int, process: ProcessInfo | None) -> Launcher:
    """Join the ranks that exist, start local ones, or stay alone.

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
