"""The search for the fastest setting: what is tried next, and what is faster for sure."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shard_core.strategy.placement import Placement
from shard_core.tuning.experiment import DEFAULTS, Experiment, Setting

if TYPE_CHECKING:
    import torch

    from shard_core.tuning.outcome import Outcome
    from shard_core.tuning.rounds import Rounds

_UNKNOWN = object()  # an option that is not there is tried, and fails in a sentence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What the search found.

    Attributes:
        rows: The defaults and every setting that was tried, in that order.
        best: The fastest setting; None if no other than the defaults is faster for sure.
    """

    rows: Sequence[Outcome]
    best: Outcome | None


def search(experiment: Experiment, rounds: Rounds, module: torch.nn.Module) -> Result:
    """Measure what a strategy names as worth trying.

    Args:
        experiment: What is measured and how.
        rounds: Measure it.
        module: The user's, not set up.

    Returns:
        The table, and the best setting.

    Raises:
        LaunchError: If the strategy does not run on so many ranks.
        RankFailed: If the defaults fail.
    """
    base = experiment.make_strategy()
    proposals = base.engine_worth_trying(module, Placement(base.options, base.info).local_ranks)
    tried: list[Setting] = []
    best: Outcome | None = None
    proposed = next(proposals, None)
    while proposed is not None:
        new = list(_new(proposed, tried, config=base.config, chosen=experiment.options))
        if new:
            tried += new
            rounds.measure([*([best.setting] if best else []), *new])
            faster = [row for row in map(rounds.outcome, tried) if row.is_faster]
            best = min(faster, key=lambda row: row.ratio, default=None)
        proposed = _next(proposals, best.setting if best else DEFAULTS)
    if best:
        best = _confirmed(best.setting, rounds)
    if not tried:
        rounds.measure([])  # whoever asks about a model wants to know that it trains, and how fast
    return Result(rows=[rounds.outcome(setting) for setting in (DEFAULTS, *tried)], best=best)


def _new(
    proposed: Sequence[Setting], tried: Sequence[Setting], *, config: Any, chosen: Mapping[str, Any]
) -> Iterator[Setting]:
    """Filter out what the user has decided, what is so already, and what was tried."""
    found = [*tried]
    for setting in proposed:
        changed = {name: value for name, value in setting.items() if getattr(config, name, _UNKNOWN) != value}
        if changed and changed not in found and not changed.keys() & chosen.keys():
            found.append(changed)
            yield changed


def _next(proposals: Generator[Sequence[Setting], Setting, None], best: Setting) -> Sequence[Setting] | None:
    """Send the best setting so far to whoever proposes, and return what is to be tried next."""
    try:
        return proposals.send(best)
    except StopIteration:
        return None


def _confirmed(setting: Setting, rounds: Rounds) -> Outcome | None:
    """Measure the best once more: of many that are alike one looks fastest by chance."""
    first = len(rounds)
    rounds.measure([setting])
    return rounds.outcome(setting) if rounds.outcome(setting, since=first).is_faster else None
