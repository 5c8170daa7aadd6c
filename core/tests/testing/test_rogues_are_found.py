"""The kit's strategies with a mistake are found by random programs, too, wherever programs do what shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rogues.plugin import FACTORIES

from shard_core.testing.programs.campaign import campaign

FOUND = (
    # what a gradient means
    *("summed", "rescaled", "ignores_gradient", "loses_deferred", "ignores_denominator", "local_denominator"),
    *("fills_missing_gradients", "local_norm", "never_clips", "always_two_norm", "ignores_clip_value", "shows_sums"),
    *("loses_hooks", "keeps_weights", "assigns_outside", "returns_to_the_forward", "cuts_off_objects"),
    *("keeps_half_of_a_backward", "forgets_writes", "holds_on", "keeps_what_a_failed_forward_gathered"),
    # what setup leaves alone, and ranks have copies of
    *("forgets_state", "levels_groups", "breaks_ties", "thaws", "forgets_buffers", "resets_learning_rate"),
    *(
        "divides_sparse_twice",
        "sends_nothing",
        "shows_its_own_buffers",
        "one_optimizer_steps",
        "averages_forwards_alone",
    ),
    # which dtype where, and what is random
    *("mixes_instead", "computes_in_full", "steps_on_overflow", "steps_silently", "seeds_anew", "masks_alike"),
    *("reseeds_alike", "never_trains", "runs_anew", "scaled_norm"),
    # who sees what, and how ranks talk
    *("counts_fillers", "uneven_data", "rank_dependent", "reduces_nothing", "returns_local_values"),
    *("gathers_backwards", "drops_sync_grads"),
    # what is kept
    *("drops_moments", "forgets_random_numbers", "rounds_a_tensor", "averages_copies", "whole_everywhere"),
    *("keeps_its_first_look", "counts_steps_together", "saves_later", "hushes_failures", "sends_parameters_only"),
    *("hands_out_what_trains", "passes_non_finite", "drops_the_clipped", "trains_the_unfrozen_alone"),
    *("skips_a_weight", "max_is_sum", "saves_its_first_save", "averages_over_users", "cuts_second_derivatives"),
)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FOUND)
def test_a_mistake_that_a_promise_names_is_found_by_programs(name, site, monkeypatch, worlds):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    entries = {"shard.strategies": dict.fromkeys(FACTORIES, "rogues.plugin")}
    site.install("shard-rogues", requires=("shard-core>=1,<2",), entries=entries)
    report = campaign(name, count=500, others=(), worlds=worlds)
    assert report.defect is not None
