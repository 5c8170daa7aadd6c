"""What is reported of outcomes."""

from __future__ import annotations

import pytest

from shard_core.tuning.outcome import Outcome
from shard_core.tuning.search import Result
from shard_core.tuning.verdict import verdict

DEFAULTS = Outcome(setting={}, milliseconds=10.0, ratio=1.0, noise=0.0, peak_bytes=1000, same_loss=True)


def row(ratio, *, noise=0.01, peak=1000, same=True):
    return Outcome(setting={"size": 1}, milliseconds=1.0, ratio=ratio, noise=noise, peak_bytes=peak, same_loss=same)


@pytest.mark.parametrize(
    ("tried", "best", "says"),
    [
        (row(0.8), True, "Fastest: size=1, in 0.80 of the time of the defaults."),
        (row(0.8, peak=1500), True, "of the defaults and with 1.50 times the memory."),
        (row(0.8, peak=None), True, "of the time of the defaults."),
        (row(1.2, peak=500), False, "than measurements of one differ."),
        (row(1.0, peak=990), False, "than measurements of one differ."),
        (row(1.0, peak=500, same=False), False, "than measurements of one differ."),
        (row(1.0, peak=500), False, "theirs within the noise, size=1 trains with 0.50 times the memory."),
        (row(1.0, peak=500, noise=0.4), False, "They differ by up to 40%, so give more --rounds, or wait until"),
        (Outcome(setting={"size": 1}, problem="died."), False, "than measurements of one differ."),
    ],
)
def test_time_decides_and_memory_is_reported(tried, best, says):
    sentence = verdict(Result(rows=[DEFAULTS, tried], best=tried if best else None), "the defaults")
    assert says in sentence
    assert sentence.startswith("Fastest" if best else "Keep the defaults")
