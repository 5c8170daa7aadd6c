"""Setting up modules, optimizers and schedulers changes their place and nothing else."""

from __future__ import annotations

from shard_core.testing.suites.suite import Suite


class Setup(Suite):
    """Setting up modules, optimizers and schedulers changes their place and nothing else."""
