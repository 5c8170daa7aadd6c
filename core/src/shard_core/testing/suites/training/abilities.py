"""Optional promises about modules and optimizers: what is declared works, what is not is refused."""

from __future__ import annotations

from shard_core.testing.suites.suite import Suite


class Abilities(Suite):
    """Optional promises about modules and optimizers: what is declared works, what is not is refused."""
