"""What the trials of a setting come to, beside those of the defaults."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shard_core.tuning.experiment import Setting
    from shard_core.tuning.ledger import Measured

#: A difference smaller than this is not worth an option, however surely it is there.
WORTH = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A setting and the defaults, measured in the same round.

    Attributes:
        tried: The setting.
        defaults: The defaults.
    """

    tried: Measured
    defaults: Measured

    @property
    def ratio(self) -> float:
        """Return the setting's time per step as a fraction of the defaults'."""
        return statistics.median(self.tried.seconds) / statistics.median(self.defaults.seconds)

    @property
    def loss_difference(self) -> float:
        """Return by how much a loss differs at most, relative to the defaults' own."""
        pairs = zip(self.tried.losses, self.defaults.losses, strict=True)
        return max(map(_difference, *zip(*pairs, strict=True)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One row of the table.

    Attributes:
        setting: The options that were tried; empty for the defaults.
        milliseconds: The time per step: the median over rounds of each round's median.
        ratio: That time as a part of the defaults' in the same round: the median over rounds.
        noise: How far ratios of different rounds lie apart: the range of their middle half.
        peak_bytes: The most a rank held during a step; None if that is unknown.
        loss_difference: By how much a loss differs at most from the defaults', relatively.
        same_loss: Whether it ran and that is no more than rounding, so that it trains as the defaults do.
        problem: Why there are no figures, in a sentence; None if there are.
    """

    setting: Setting
    milliseconds: float = math.nan
    ratio: float = math.nan
    noise: float = math.nan
    peak_bytes: int | None = None
    loss_difference: float = math.nan
    same_loss: bool = False
    problem: str | None = None

    @property
    def is_faster(self) -> bool:
        """Return whether it trains as the defaults do, faster by more than chance and by what is worth an option."""
        return self.same_loss and 1 - self.ratio > max(WORTH, self.noise)

    @property
    def is_even(self) -> bool:
        """Return whether it trains as the defaults do, in a time that cannot be distinguished from theirs."""
        return self.same_loss and abs(1 - self.ratio) <= max(WORTH, self.noise)


def outcome(setting: Setting, pairs: Sequence[Pair], tolerance: float) -> Outcome:
    """Sum up the rounds of a setting.

    Args:
        setting: The options.
        pairs: What was measured of it, at least once.
        tolerance: The relative difference of losses that is rounding.

    Returns:
        The row.

    Example:
        >>> from shard_core.tuning.ledger import Measured
        >>> tried, defaults = (Measured(seconds=[t], losses=[1.0], peak_bytes=None) for t in (0.9, 1.0))
        >>> row = outcome({"overlap": True}, [Pair(tried=tried, defaults=defaults)] * 3, 1e-4)
        >>> row.milliseconds, row.ratio, row.is_faster
        (900.0, 0.9, True)
    """
    ratios = [pair.ratio for pair in pairs]
    difference = max(pair.loss_difference for pair in pairs)
    return Outcome(
        setting=setting,
        milliseconds=1000 * statistics.median(statistics.median(pair.tried.seconds) for pair in pairs),
        ratio=statistics.median(ratios),
        noise=_middle_half(ratios),
        peak_bytes=next((pair.tried.peak_bytes for pair in pairs if pair.tried.peak_bytes is not None), None),
        loss_difference=difference,
        same_loss=difference <= tolerance,
    )


def _difference(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    difference = abs(one - other) / max(abs(other), 1e-12)
    return difference if math.isfinite(difference) else math.inf


def _middle_half(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low
