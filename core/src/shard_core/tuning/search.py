"""The search for the fastest setting: trials in interleaved rounds, and what to try next."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from shard_core.strategy.placement import Placement
from shard_core.testing.parity.check import TOLERANCES
from shard_core.tuning.experiment import Experiment, Trial
from shard_core.tuning.outcome import Outcome, Pair, outcome
from shard_core.tuning.ranks import run_trials

if TYPE_CHECKING:
    import torch

    from shard_core.tuning.ledger import Measured

Setting: TypeAlias = Mapping[str, Any]

_DEFAULTS: Setting = {}
_UNKNOWN = object()  # an option that is not there is tried, and fails in a sentence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What the search found.

    Attributes:
        rows: The defaults and every setting that was tried, in that order; empty if there is nothing to try.
        best: The fastest setting; None if no other than the defaults is faster for sure.
    """

    rows: Sequence[Outcome]
    best: Outcome | None


class Search:
    """Measures the defaults and what a strategy names as worth trying.

    "The defaults" are those of the strategy with the options the user has chosen.

    Args:
        experiment: What is measured and how.
        rounds: How often each setting is measured, each time with all others it is compared with.
    """

    def __init__(self, experiment: Experiment, *, rounds: int) -> None:
        self._experiment = experiment
        self._rounds = rounds
        self._trials: list[list[Trial]] = []
        self._problems: list[tuple[Setting, str]] = []

    @property
    def planned(self) -> int:
        """How many trials there are, as far as is known now."""
        return sum(not self._failed(trial.setting) for round_ in self._trials for trial in round_)

    @property
    def done(self) -> int:
        """How many of them have ended."""
        return len(self._experiment.ledger.measured())

    def run(self, module: torch.nn.Module) -> Result:
        """Search.

        Args:
            module: The user's, not set up.

        Returns:
            The table, and the best setting.

        Raises:
            LaunchError: If the strategy does not run on so many ranks.
            RankFailed: If the defaults fail.
        """
        base = self._experiment.make_strategy({})
        proposals = base.engine_worth_trying(module, Placement(base.options, base.info).local_ranks)
        tried: list[Setting] = []
        best: Outcome | None = None
        proposed = next(proposals, None)
        while proposed is not None:
            new = list(self._new(proposed, base.config, tried))
            if new:
                tried += new
                self._measure([_DEFAULTS, *([best.setting] if best else []), *new])
                best = self._fastest(tried)
            proposed = _next(proposals, best.setting if best else _DEFAULTS)
        if best:
            first = len(self._trials)
            self._measure([_DEFAULTS, best.setting])
            # Of many that are alike one looks fastest by chance; measured once more, it does not.
            best = self._row(best.setting) if self._row(best.setting, since=first).is_faster else None
        rows = [self._row(setting) for setting in (_DEFAULTS, *tried)] if tried else []
        return Result(rows=rows, best=best)

    def _new(self, proposed: Sequence[Setting], config: Any, tried: Sequence[Setting]) -> Iterator[Setting]:
        """Leave out what the user has decided, what is so already, and what was tried."""
        found = [*tried]
        for setting in proposed:
            changed = {name: value for name, value in setting.items() if getattr(config, name, _UNKNOWN) != value}
            if changed and changed not in found and not changed.keys() & self._experiment.options.keys():
                found.append(changed)
                yield changed

    def _measure(self, settings: Sequence[Setting]) -> None:
        """Run rounds of trials; a setting that fails is left out of the rest of them."""
        number = sum(map(len, self._trials))
        started: list[Trial] = []
        for each in range(self._rounds):
            turn = each % len(settings)
            order = [*settings[turn:], *settings[:turn]]  # nobody always comes after the same
            round_ = [
                Trial(number=number + place, setting=setting, weighed=each == 0) for place, setting in enumerate(order)
            ]
            number += len(round_)
            self._trials.append(round_)
            started += round_
        self._run(started)

    def _run(self, trials: Sequence[Trial]) -> None:
        ledger = self._experiment.ledger
        while pending := [each for each in trials if not self._failed(each.setting)]:
            measured = ledger.measured()
            pending = [each for each in pending if each.number not in measured]
            if not pending:
                return
            try:
                self._experiment.make_strategy({}).launch(run_trials, self._experiment, pending)
            except Exception as error:
                failed = next((each.setting for each in pending if each.number == ledger.under_way()), _DEFAULTS)
                if failed == _DEFAULTS:
                    raise
                self._problems.append((failed, str(error).partition("\n")[0]))

    def _failed(self, setting: Setting) -> bool:
        return any(setting == failed for failed, _ in self._problems)

    def _fastest(self, tried: Sequence[Setting]) -> Outcome | None:
        faster = [row for row in map(self._row, tried) if row.is_faster]
        return min(faster, key=lambda row: row.ratio, default=None)

    def _row(self, setting: Setting, *, since: int = 0) -> Outcome:
        problem = next((says for failed, says in self._problems if failed == setting), None)
        if problem is not None:
            return Outcome(setting=setting, problem=problem)
        measured = self._experiment.ledger.measured()
        tolerance = TOLERANCES[self._experiment.run["precision"]]
        return outcome(setting, list(self._pairs(setting, measured, since)), tolerance)

    def _pairs(self, setting: Setting, measured: Mapping[int, Measured], since: int) -> Iterator[Pair]:
        for round_ in self._trials[since:]:
            of = {trial.number: trial.setting for trial in round_ if trial.number in measured}
            tried = next((measured[number] for number, each in of.items() if each == setting), None)
            defaults = next((measured[number] for number, each in of.items() if each == _DEFAULTS), None)
            if tried and defaults:
                yield Pair(tried=tried, defaults=defaults)


def _next(proposals: Generator[Sequence[Setting], Setting, None], best: Setting) -> Sequence[Setting] | None:
    """Tell whoever proposes the best setting so far, and take what is to be tried next."""
    try:
        return proposals.send(best)
    except StopIteration:
        return None
