"""What is made of times and losses."""

from __future__ import annotations

import math

import pytest

from shard_core.tuning.ledger import Measured
from shard_core.tuning.outcome import Pair, outcome

TOLERANCE = 1e-4


def pair(seconds, defaults=1.0, losses=(2.0, 1.0), truth=(2.0, 1.0)):
    return Pair(
        tried=Measured(seconds=[seconds], losses=list(losses), peak_bytes=None),
        defaults=Measured(seconds=[defaults], losses=list(truth), peak_bytes=None),
    )


@pytest.mark.parametrize(
    ("seconds", "faster"),
    [
        ((0.8, 0.81, 0.79, 0.8, 0.8), True),
        ((0.8, 0.81, 3.0, 0.8, 0.8), True),  # somebody else needed the machine for a round
        ((0.99, 0.99, 0.99, 0.99, 0.99), False),  # surely, and not worth an option
        ((0.7, 0.9, 1.1, 0.8, 1.0), False),
        ((1.2, 1.2, 1.2, 1.2, 1.2), False),
    ],
)
def test_only_what_stands_out_from_the_noise_is_faster(seconds, faster):
    assert outcome({}, [pair(each) for each in seconds], TOLERANCE).is_faster == faster


def test_drift_of_the_machine_hits_all_alike():
    row = outcome({}, [pair(0.9 * drift, drift) for drift in (1.0, 2.0, 4.0, 8.0)], TOLERANCE)
    assert row.ratio == pytest.approx(0.9)
    assert row.noise == pytest.approx(0.0)
    assert row.is_faster


@pytest.mark.parametrize(
    ("losses", "truth", "same"),
    [
        ((2.0, 1.00001), (2.0, 1.0), True),
        ((2.0, 1.1), (2.0, 1.0), False),
        ((2.0, math.nan), (2.0, 1.0), False),
        ((2.0, math.nan), (2.0, math.nan), True),
        ((2.0, math.inf), (2.0, 1.0), False),
    ],
)
def test_what_trains_differently_is_never_faster(losses, truth, same):
    row = outcome({}, [pair(0.5), pair(0.5, losses=losses, truth=truth)], TOLERANCE)
    assert row.same_loss == row.is_faster == same
