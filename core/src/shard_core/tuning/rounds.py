"""Rounds in which settings take turns, so that a machine that grows slow does so for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shard_core.errors import RankFailed, ShardError
from shard_core.parity.check import TOLERANCES
from shard_core.tuning.experiment import DEFAULTS, Experiment, Setting, Trial
from shard_core.tuning.outcome import Outcome, Pair, outcome
from shard_core.tuning.ranks import run_trials

if TYPE_CHECKING:
    from shard_core.tuning.ledger import Measured


class Rounds:
    """Measures settings, and survives those that fail.

    Args:
        experiment: What is measured and how.
        times: How many rounds settings are measured in at a time.
    """

    def __init__(self, experiment: Experiment, *, times: int) -> None:
        self._experiment = experiment
        self._times = times
        self._rounds: list[list[Trial]] = []
        self._problems: list[tuple[Setting, str]] = []

    def __len__(self) -> int:
        """Count the rounds so far."""
        return len(self._rounds)

    @property
    def planned(self) -> int:
        """Return how many trials there are, as far as is known now."""
        return sum(self._problem(trial.setting) is None for round_ in self._rounds for trial in round_)

    @property
    def done(self) -> int:
        """Return how many of them have ended."""
        return len(self._experiment.ledger.measured())

    def measure(self, settings: Sequence[Setting]) -> None:
        """Run rounds of the defaults and some settings; one that fails is left out of the rest of them.

        Args:
            settings: The settings.

        Raises:
            LaunchError: If ranks cannot be started.
            RankFailed: If the defaults fail.
        """
        everybody = [DEFAULTS, *settings]
        number = sum(map(len, self._rounds))
        for each in range(self._times):
            turn = each % len(everybody)
            order = [*everybody[turn:], *everybody[:turn]]  # nobody always comes after the same
            self._rounds.append(
                [Trial(number=number + place, setting=one, weighed=each == 0) for place, one in enumerate(order)]
            )
            number += len(order)
        while pending := self._pending():
            try:
                self._experiment.make_strategy().launch(run_trials, self._experiment, pending)
            except Exception as error:
                under_way = self._experiment.ledger.under_way()
                failed = next((trial.setting for trial in pending if trial.number == under_way), DEFAULTS)
                if failed == DEFAULTS:
                    raise
                self._problems.append((failed, _sentence(error)))

    def outcome(self, setting: Setting, *, since: int = 0) -> Outcome:
        """Sum up what was measured of a setting.

        Args:
            setting: One that was measured.
            since: Which round is the first that counts.
        """
        problem = self._problem(setting)
        if problem is not None:
            return Outcome(setting=setting, problem=problem)
        tolerance = TOLERANCES[self._experiment.run["precision"]]
        return outcome(setting, list(self._pairs(setting, since)), tolerance)

    def _pending(self) -> list[Trial]:
        measured = self._experiment.ledger.measured()
        left = [trial for round_ in self._rounds for trial in round_ if trial.number not in measured]
        return [trial for trial in left if self._problem(trial.setting) is None]

    def _problem(self, setting: Setting) -> str | None:
        return next((says for failed, says in self._problems if failed == setting), None)

    def _pairs(self, setting: Setting, since: int) -> Iterator[Pair]:
        measured = self._experiment.ledger.measured()
        for round_ in self._rounds[since:]:
            tried, defaults = (_of(each, round_, measured) for each in (setting, DEFAULTS))
            if tried and defaults:
                yield Pair(tried=tried, defaults=defaults)


def _of(setting: Setting, trials: Sequence[Trial], measured: dict[int, Measured]) -> Measured | None:
    return next((measured.get(trial.number) for trial in trials if trial.setting == setting), None)


def _sentence(error: Exception) -> str:
    """Format what went wrong, without the traceback that may follow."""
    if isinstance(error, RankFailed) and error.sentence:
        return error.sentence
    first_line = str(error).partition("\n")[0]
    return first_line if isinstance(error, ShardError) else f"{type(error).__name__}: {first_line}"
