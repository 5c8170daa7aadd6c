"""What a reader sees of a file that is being written."""

from __future__ import annotations

from shard_core.tuning.ledger import Ledger, Measured

MEASURED = Measured(seconds=[0.5], losses=[1.0, float("nan")], peak_bytes=3)


def test_a_trial_is_under_way_between_its_begin_and_its_end(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    assert (ledger.under_way(), ledger.measured()) == (None, {})
    ledger.begin(4)
    assert (ledger.under_way(), ledger.measured()) == (4, {})
    ledger.end(4, MEASURED)
    assert ledger.under_way() is None
    assert repr(ledger.measured()) == repr({4: MEASURED})


def test_half_a_line_is_not_read(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    ledger.begin(1)
    with (tmp_path / "ledger").open("a") as file:
        file.write('{"end": 1, "sec')
    assert ledger.under_way() == 1
    assert ledger.measured() == {}
