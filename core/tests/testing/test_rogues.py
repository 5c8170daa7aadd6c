"""Strategies with one mistake each are found out by the promise that names it, and by no other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import pytest
from rogues.judge import Trial, judge
from rogues.plugin import FACTORIES

from shard_core.testing import Conformance
from shard_core.testing.rules import promises_of

_BUILDING = ("training.setup", "training.parity", "training.structure", "training.replicas")
_ADDING = ("training.accumulation", "training.clipping")
_CLIPPING = ("training.clipping", "training.float16")
_CASTING = ("training.precision", "training.float16")
_ABLE = ("training.capabilities", "training.optimizers")
_STARTING = ("training.setup", "training.randomness", "training.data")
_CHECKPOINT = ("checkpoint",)
_SECONDS, _LONG_SECONDS = 900, 2 * 3600


@dataclasses.dataclass(frozen=True)
class Fault:
    """What a rogue does wrong.

    Attributes:
        promise: The one that names it.
        suites: Those it could plausibly break.
        world_sizes: Where the mistake shows.
    """

    promise: str
    suites: tuple[str, ...]
    world_sizes: tuple[int, ...] = (2,)


ROGUES = {
    # what it says about itself
    "imports_torch": Fault("metadata_is_pure", ("plugin",)),
    "takes_what_comes": Fault("capabilities_are_listed", ("plugin",)),
    "silent_option": Fault("options_are_documented", ("plugin",)),
    "names_no_versions": Fault("version_range_is_declared", ("plugin",)),
    "shrugs": Fault("unavailable_has_a_sentence", ("plugin",)),
    "lacks_a_member": Fault("interface_is_whole", ("plugin",)),
    "starts_at_once": Fault("construction_starts_nothing", ("plugin",)),
    # what a gradient means
    "summed": Fault("averages_gradients", ("training",)),
    "rescaled": Fault("micro_batches_add_up", _ADDING),
    "ignores_gradient": Fault("backward_takes_a_gradient", _ADDING),
    "loses_deferred": Fault("deferring_changes_nothing", _ADDING),
    "refuses_to_defer": Fault("deferring_changes_nothing", _ADDING),
    "defers_nothing": Fault("deferring_saves_traffic", _ADDING),
    "defers_in_silence": Fault("deferring_saves_traffic", _ADDING),
    "repeats_itself": Fault("deferring_saves_traffic", _ADDING),
    "steps_inside": Fault("step_inside_is_refused", _ADDING),
    "ignores_denominator": Fault("denominator_gives_the_global_mean", _ADDING),
    "local_denominator": Fault("ragged_batches_weigh_by_their_size", _ADDING),
    "fills_missing_gradients": Fault("unused_parameters_keep_their_values", _BUILDING),
    "averages_over_users": Fault("ranks_may_use_different_parameters", _BUILDING),
    "local_norm": Fault("norm_is_global_and_alike", _CLIPPING),
    "never_clips": Fault("clips_by_norm", _CLIPPING),
    "always_two_norm": Fault("clips_by_other_norms", _CLIPPING),
    "ignores_clip_value": Fault("clips_by_value", _CLIPPING),
    "hides_clip_value": Fault("clips_by_value", _CLIPPING),
    "passes_non_finite": Fault("non_finite_norm_raises_everywhere", _CLIPPING),
    "shows_sums": Fault("gradients_are_shown_whole", ("training.gradients",)),
    "keeps_weights": Fault("changes_by_hand_count", _BUILDING),
    # what setup leaves alone
    "drops_the_optimizer": Fault("optimizer_made_before_or_after_setup", _BUILDING),
    "forgets_state": Fault("optimizer_state_moves_along", _BUILDING),
    "copies_optimizers": Fault("optimizers_stay_the_same_objects", _BUILDING),
    "levels_groups": Fault("param_groups_keep_their_settings", _BUILDING),
    "breaks_ties": Fault("ties_stay_tied", _BUILDING),
    "thaws": Fault("frozen_parameters_stay_frozen", _BUILDING),
    "trains_the_unfrozen_alone": Fault("unfrozen_parameters_train", _BUILDING),
    "forgets_buffers": Fault("buffers_are_right", _BUILDING),
    "resets_learning_rate": Fault("schedulers_count_steps_once", _BUILDING),
    # what ranks have copies of
    "sends_nothing": Fault("starts_from_rank_zero", _BUILDING),
    "sends_parameters_only": Fault("starts_from_rank_zero", _BUILDING),
    "shows_its_own_buffers": Fault("changed_buffers_are_of_one_rank", _BUILDING),
    # what a strategy can do
    "one_optimizer_steps": Fault("two_optimizers", _ABLE),
    "closure_once": Fault("closure_is_evaluated_again", _ABLE),
    "refuses_by_name": Fault("any_optimizer_steps", _ABLE),
    "averages_forwards_alone": Fault("entry_methods_run", _ABLE),
    "boasts_meta_init": Fault("no_rank_builds_all", _ABLE),
    # which dtype where
    "mixes_instead": Fault("precision_has_its_dtypes", _CASTING),
    "shuns_a_precision": Fault("precision_has_its_dtypes", _CASTING),
    "computes_in_full": Fault("mixed_precision_is_autocast", _CASTING),
    "steps_on_overflow": Fault("overflow_skips_the_step_everywhere", _CASTING),
    "scaled_norm": Fault("norms_are_unscaled", _CLIPPING),
    "steps_silently": Fault("step_says_whether_it_stepped", _CASTING),
    # what is random
    "seeds_anew": Fault("same_seed_same_weights", _STARTING),
    "masks_alike": Fault("dropout_masks_differ_between_data_ranks", _STARTING),
    "never_trains": Fault("dropout_drops_its_share", _STARTING),
    "runs_anew": Fault("same_seed_same_run", _STARTING),
    # who sees what
    "unshared_data": Fault("samples_are_shared_out", _STARTING),
    "unshared_streams": Fault("streams_are_shared_by_batches", _STARTING),
    "reads_ahead": Fault("streams_go_on_at_any_world_size", _STARTING, (1, 2)),
    "counts_fillers": Fault("metrics_count_every_sample_once", _STARTING),
    "uneven_data": Fault("ranks_take_equally_many_steps", _STARTING),
    # how ranks talk
    "max_is_sum": Fault("all_reduce_has_its_operations", ("collectives",)),
    "rank_dependent": Fault("results_are_alike_on_all_ranks", ("collectives",)),
    "reduces_in_place": Fault("all_reduce_leaves_its_input", ("collectives",)),
    "reduces_nothing": Fault("reduces_tensors_only", ("collectives",)),
    "returns_local_values": Fault("reduces_structures", ("collectives",)),
    "gathers_backwards": Fault("gathers_in_rank_order", ("collectives",)),
    "drops_sync_grads": Fault("gathers_with_gradients", ("collectives",)),
    "hides_sync_grads": Fault("gathers_with_gradients", ("collectives",)),
    "broadcasts_from_zero": Fault("broadcasts_objects", ("collectives",)),
    "gathers_its_own_object": Fault("gathers_objects", ("collectives",)),
    "never_waits": Fault("barrier_waits", ("collectives",)),
    "unknown_is_mean": Fault("wrong_operation_is_refused", ("collectives",)),
    # what is kept
    "drops_moments": Fault("moments_come_back", _CHECKPOINT),
    "forgets_random_numbers": Fault("random_numbers_go_on", (*_CHECKPOINT, "training.randomness")),
    "groups_by_position": Fault("groups_come_back_by_name", _CHECKPOINT),
    "rounds_a_tensor": Fault("round_trip_is_bitwise", _CHECKPOINT),
    "one_size_only": Fault("loads_at_another_world_size", _CHECKPOINT, (1, 2)),
    "never_strict": Fault("strict_names_every_difference", _CHECKPOINT),
    "always_strict": Fault("not_strict_takes_what_fits", _CHECKPOINT),
    "fills_before_refusing": Fault("mismatch_changes_nothing", _CHECKPOINT),
    "skips_a_weight": Fault("weights_of_others_fill_the_module", ("checkpoint.weights",)),
    "ignores_filter": Fault("filter_keeps_what_it_names", _CHECKPOINT),
    "keeps_values": Fault("plain_values_come_back", _CHECKPOINT),
    "whole_everywhere": Fault("state_dicts_are_whole", _CHECKPOINT),
    "keeps_its_first_look": Fault("every_state_dict_is_of_its_moment", _CHECKPOINT),
    "saves_its_first_save": Fault("every_state_dict_is_of_its_moment", _CHECKPOINT),
    "counts_steps_together": Fault("steps_are_counted_for_each_parameter", _CHECKPOINT),
    "removes_the_old": Fault("killed_save_leaves_the_old_or_the_new", _CHECKPOINT),
    "loads_damaged": Fault("corrupted_byte_is_named", _CHECKPOINT),
    "writes_pickle": Fault("holds_no_pickle", _CHECKPOINT),
    "saves_later": Fault("background_save_is_of_its_moment", _CHECKPOINT),
    "hushes_failures": Fault("failed_background_save_is_raised", _CHECKPOINT),
    # who runs
    "last_rank_returns": Fault("launch_returns_rank_zeros_result", ("launcher",)),
    "swallows_exceptions": Fault("failing_rank_is_reported", ("launcher",)),
    "leaves_with_three": Fault("exit_code_is_zero", ("launcher",)),
    "stays_here": Fault("functions_that_cannot_travel_are_refused", ("launcher",)),
}

#: Judged in every run, one by each suite; the others wait for the long run, since each costs seconds.
_ALWAYS = (
    *("imports_torch", "takes_what_comes", "starts_at_once", "swallows_exceptions"),
    *("summed", "rescaled", "local_norm", "fills_missing_gradients", "sends_nothing", "drops_the_optimizer"),
    "shows_sums",
    *("one_optimizer_steps", "averages_forwards_alone", "mixes_instead", "steps_on_overflow"),
    *("masks_alike", "unshared_streams", "returns_local_values", "never_waits"),
    *("drops_moments", "rounds_a_tensor", "one_size_only", "never_strict", "skips_a_weight"),
    *("counts_steps_together", "loads_damaged", "saves_later"),
)

#: Promises that cost seconds: in the short run they judge who breaks them.
_SLOW = (
    "compiled_modules_train",
    "missing_rank_is_named",
    "missing_rank_is_named_in_save",
    "killed_save_leaves_the_old_or_the_new",
    "joins_torchrun",
    "failing_rank_is_reported",
    "exit_code_is_zero",
)

#: Promises that take most of the kit's time; in the long run they judge those who start ranks, and the honest one.
_SCRIPTS = (
    "launch_returns_rank_zeros_result",
    "joins_torchrun",
    "failing_rank_is_reported",
    "exit_code_is_zero",
    "functions_that_cannot_travel_are_refused",
    "compiled_modules_train",
)


#: Rogues whom the long run judges in one session.
_PORTION = 6


def _when(rogue: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if rogue in _ALWAYS else (pytest.mark.long,)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Return what became of each promise under the rogues that are asked for, all judged in one session."""
    asked = [item.callspec.params["rogue"] for item in request.session.items if _asks(item, "outcomes")]
    return judge(tmp_path_factory.mktemp("rogues"), {name: _short_trial(name) for name in asked}, _SECONDS)


@pytest.fixture(scope="module")
def long_outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, str]]:
    """Return a callable that says what became of every promise under a rogue.

    The whole kit against every rogue takes an hour: those that are asked for are judged in portions, of which each
    reports when its own session ends, so that what breaks the run off loses one of them alone.
    """
    asked = [item.callspec.params["rogue"] for item in request.session.items if _asks(item, "long_outcomes")]

    @functools.cache
    def judge_portion(number: int) -> dict[str, dict[str, str]]:
        names = asked[number * _PORTION : (number + 1) * _PORTION]
        trials = {name: _long_trial(name) for name in names}
        return judge(tmp_path_factory.mktemp("rogues"), trials, _LONG_SECONDS)

    return lambda rogue: judge_portion(asked.index(rogue) // _PORTION)[rogue]


@pytest.mark.timeout(_SECONDS)
@pytest.mark.parametrize("rogue", [pytest.param(each, marks=_when(each)) for each in ROGUES])
def test_is_found_out_by_the_promise_that_names_its_fault(rogue: str, outcomes: dict[str, dict[str, str]]) -> None:
    _assert_found_out(outcomes[rogue], ROGUES[rogue].promise)


@pytest.mark.timeout(_SECONDS)
@pytest.mark.parametrize("rogue", ["honest"])
def test_is_judged_by_what_it_does(rogue: str, outcomes: dict[str, dict[str, str]]) -> None:
    assert not _broken(outcomes[rogue])
    assert set(outcomes[rogue]) == set(promises_of(Conformance)) - set(_SLOW)


@pytest.mark.long
@pytest.mark.timeout(_LONG_SECONDS)
@pytest.mark.parametrize("rogue", ROGUES)
def test_breaks_no_other_promise_of_the_kit(rogue: str, long_outcomes: Callable[[str], dict[str, str]]) -> None:
    _assert_found_out(long_outcomes(rogue), ROGUES[rogue].promise)


@pytest.mark.long
@pytest.mark.timeout(_LONG_SECONDS)
@pytest.mark.parametrize("rogue", ["honest"])
def test_delegating_breaks_no_promise_of_the_kit(rogue: str, long_outcomes: Callable[[str], dict[str, str]]) -> None:
    assert not _broken(long_outcomes(rogue))
    assert set(long_outcomes(rogue)) == set(promises_of(Conformance))


def test_every_rogue_is_judged() -> None:
    assert set(FACTORIES) == {"honest", *ROGUES}


def test_every_suite_finds_a_rogue() -> None:
    promises = {name: getattr(Conformance, f"test_{name}").__module__ for name in promises_of(Conformance)}
    assert {promises[ROGUES[rogue].promise] for rogue in _ALWAYS} == set(promises.values())


def _asks(item: pytest.Item, fixture: str) -> bool:
    return fixture in getattr(item, "fixturenames", ())


def _short_trial(rogue: str) -> Trial:
    if rogue == "honest":
        return Trial(suites=("",), spared=_SLOW)
    fault = ROGUES[rogue]
    spared = tuple(name for name in _SLOW if name != fault.promise)
    return Trial(suites=fault.suites, spared=spared, world_sizes=fault.world_sizes)


def _long_trial(rogue: str) -> Trial:
    if rogue == "honest":
        return Trial(suites=("",), world_sizes=(1, 2, 3))
    fault = ROGUES[rogue]
    spared = () if "launcher" in fault.suites else _SCRIPTS
    return Trial(suites=("",), spared=spared, world_sizes=fault.world_sizes)


def _broken(outcomes: Mapping[str, str]) -> dict[str, str]:
    return {name: how for name, how in outcomes.items() if how not in ("", "not judged")}


def _assert_found_out(outcomes: Mapping[str, str], promise: str) -> None:
    broken = _broken(outcomes)
    assert set(broken) == {promise}, "\n\n".join(f"{name}: {how}" for name, how in broken.items()) or "all is kept"
