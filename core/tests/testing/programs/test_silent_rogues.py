"""Strategies that are silently wrong, each as some project has been, are found by few programs of everyone's."""

from __future__ import annotations

from pathlib import Path

import pytest

from shard_core.testing.programs.campaign import campaign
from shard_core.testing.programs.plain.comparison import BOUNDS

ROGUES = (
    # what is clipped, and by which norm
    *("counts_copies", "scales_by_parts", "largest_is_length"),
    # which rule steps, and with which settings
    *("levels_rates", "levels_decay", "keeps_first_rate", "minimizes", "couples_decay", "forgets_nesterov"),
    *("steps_the_unused", "closes_locally", "takes_signs"),
    # what adds up until then
    *("leaves_deferred_local", "averages_last_twice", "drops_deferred_unused", "own_denominator"),
    "keeps_denominators",
    *("weighs_batches_alike", "keeps_frozen_gradients"),
    # what comes back
    *("forgets_tied_moments", "restarts_count", "restores_one_generator", "saves_last_ranks_buffers"),
    "thaws_on_load",
    # what forwards return
    *("scales_evaluation", "keeps_own_buffers", "seeds_alike", "masks_alike"),
)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ROGUES)
def test_a_silent_mistake_is_found_by_its_numbers(name, site, monkeypatch, worlds):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    entries = {"shard.strategies": dict.fromkeys(ROGUES, "silent.plugin")}
    site.install("shard-silent", requires=("shard-core>=1,<2",), entries=entries)
    report = campaign(name, count=500, others=(), worlds=worlds)
    assert report.defect is not None
    assert report.defect.judgement.symptom.rpartition(" ")[2] in BOUNDS
    assert not report.refusals or max(each.count for each in report.refusals) <= max(1, report.count // 10)
