"""What a search comes to, in a sentence or two."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shard_core.tuning.experiment import Setting
    from shard_core.tuning.outcome import Outcome
    from shard_core.tuning.search import Result

#: A change of memory that is reported beside the time that is won.
_WORTH_A_WORD = 0.05

#: Rounds that lie further apart than this hide what people look for.
_BUSY = 0.1


def verdict(result: Result, base: str) -> str:
    """Report which setting to take.

    Args:
        result: Of a search that found something to try.
        base: What settings were compared with, such as "the defaults".

    Returns:
        What stands under the table.
    """
    defaults, *others = result.rows
    if result.best is not None:
        memory = _memory(result.best, defaults)
        says = f"Fastest: {spelled(result.best.setting)}, in {result.best.ratio:.2f} of the time of {base}"
        return f"{says} and with {memory}." if memory else f"{says}."
    says = f"Keep {base}: no setting that trains the same is faster by more than measurements of one differ."
    noise = max((row.noise for row in others if row.same_loss), default=0.0)
    if noise > _BUSY:
        return f"{says} They differ by up to {noise:.0%}, so give more --rounds, or wait until the machine is quiet."
    lightest = min((row for row in others if row.is_even and row.peak_bytes), key=_peak, default=defaults)
    memory = _memory(lightest, defaults)
    if memory and _peak(lightest) < _peak(defaults):
        return f"{says} In a time that is theirs within the noise, {spelled(lightest.setting)} trains with {memory}."
    return says


def spelled(options: Setting) -> str:
    """Write options as they are passed.

    Args:
        options: By name.

    Example:
        >>> spelled({"unit_bytes": 1, "backward_prefetch": None})
        'unit_bytes=1, backward_prefetch=None'
    """
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _memory(row: Outcome, defaults: Outcome) -> str:
    """Format how much memory a setting takes, if that is another amount and known."""
    if row.peak_bytes is None or defaults.peak_bytes is None:
        return ""
    times = row.peak_bytes / defaults.peak_bytes
    return f"{times:.2f} times the memory" if abs(times - 1) > _WORTH_A_WORD else ""


def _peak(row: Outcome) -> int:
    return row.peak_bytes or 0
