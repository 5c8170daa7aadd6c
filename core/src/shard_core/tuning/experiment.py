"""What is measured and how, in a form that travels to the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from shard_core.selection import get_strategy
from shard_core.tuning.ledger import Ledger

if TYPE_CHECKING:
    from shard_core.parity.recipe import Recipe
    from shard_core.strategy import Strategy

Setting: TypeAlias = Mapping[str, Any]
"""Options that are tried beside those the user has chosen."""

DEFAULTS: Final[Setting] = {}
"""What every setting is compared with: the user's options, and the strategy's defaults for all others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """What all measurements have alike.

    Attributes:
        recipe: How the user's model, batch and optimizer are made, prepared.
        strategy: The strategy's name.
        run: Devices, accelerator and precision, as ``get_strategy`` takes them.
        options: The strategy's options that the user has chosen; no setting changes them.
        warm_up: How many steps are taken before any is timed.
        steps: How many are timed.
    """

    recipe: Recipe
    strategy: str
    run: Mapping[str, Any]
    options: Mapping[str, Any]
    warm_up: int
    steps: int

    @property
    def ledger(self) -> Ledger:
        """Return the file in which the ranks record what they have measured."""
        return Ledger(Path(self.recipe.folder, "ledger.jsonl"))

    def make_strategy(self, setting: Setting = DEFAULTS) -> Strategy:
        """Build the strategy anew; nothing is started by it.

        Args:
            setting: What is tried.
        """
        return get_strategy(self.strategy, **self.run, **{**self.options, **setting})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One setting, measured once.

    Attributes:
        number: Its place among all trials.
        setting: What is tried.
        weighed: Whether memory is measured as well.
    """

    number: int
    setting: Setting
    weighed: bool
