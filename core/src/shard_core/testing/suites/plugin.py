"""What a backend says about its strategy before anything of it is imported."""

from __future__ import annotations

from shard_core.testing.suites.suite import Suite


class Plugin(Suite):
    """What a backend says about its strategy before anything of it is imported."""
