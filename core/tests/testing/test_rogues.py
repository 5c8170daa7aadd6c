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

_SECONDS, _LONG_SECONDS = 900, 2 * 3600


@dataclasses.dataclass(frozen=True)
class Fault:
    """What a rogue does wrong.

    Attributes:
        promise: The one that names it.
        world_sizes: Where the mistake shows.
    """

    promise: str
    world_sizes: tuple[int, ...] = (2,)


ROGUES = {
    # what it says about itself
    "imports_torch": Fault("metadata_is_pure"),
    "takes_what_comes": Fault("capabilities_are_listed"),
    "silent_option": Fault("options_are_documented"),
    "names_no_versions": Fault("version_range_is_declared"),
    "shrugs": Fault("unavailable_has_a_sentence"),
    "lacks_a_member": Fault("interface_is_whole"),
    "starts_at_once": Fault("construction_starts_nothing"),
    # what a gradient means
    "summed": Fault("averages_gradients"),
    "rescaled": Fault("micro_batches_add_up"),
    "ignores_gradient": Fault("backward_takes_a_gradient"),
    "loses_deferred": Fault("deferring_changes_nothing"),
    "refuses_to_defer": Fault("deferring_changes_nothing"),
    "defers_nothing": Fault("deferring_saves_traffic"),
    "defers_in_silence": Fault("deferring_saves_traffic"),
    "repeats_itself": Fault("deferring_saves_traffic"),
    "steps_inside": Fault("step_inside_is_refused"),
    "averages_the_named_alone": Fault("modules_wait_apart"),
    "ignores_denominator": Fault("denominator_gives_the_global_mean"),
    "local_denominator": Fault("ragged_batches_weigh_by_their_size"),
    "fills_missing_gradients": Fault("unused_parameters_keep_their_values"),
    "averages_over_users": Fault("ranks_may_use_different_parameters"),
    "local_norm": Fault("norm_is_global_and_alike"),
    "never_clips": Fault("clips_by_norm"),
    "always_two_norm": Fault("clips_by_other_norms"),
    "ignores_clip_value": Fault("clips_by_value"),
    "hides_clip_value": Fault("clips_by_value"),
    "passes_non_finite": Fault("non_finite_norm_raises_everywhere"),
    "shows_sums": Fault("gradients_are_shown_whole"),
    "loses_hooks": Fault("hooks_change_each_ranks_gradient"),
    "keeps_weights": Fault("changes_by_hand_count"),
    "assigns_outside": Fault("assigned_data_counts"),
    # what may stand between the calls of a step
    "returns_to_the_forward": Fault("changes_past_a_forward_count"),
    "drops_the_clipped": Fault("backward_after_clipping_adds_up"),
    "keeps_denominators": Fault("zeroed_sums_leave_no_denominator"),
    "counts_nothing_for_none": Fault("denominators_are_of_every_backward"),
    "takes_newcomers": Fault("layers_after_setup_train_or_are_refused"),
    "cuts_off_objects": Fault("objects_in_outputs_train"),
    # what loops and forwards do besides
    "cuts_second_derivatives": Fault("penalties_on_gradients_train"),
    "takes_assigned_gradients": Fault("assigned_gradients_are_averaged_or_refused"),
    "keeps_half_of_a_backward": Fault("interrupted_backwards_leave_nothing"),
    "keeps_what_a_failed_forward_gathered": Fault("failed_forwards_leave_nothing"),
    "hooks_see_old_weights": Fault("hooks_on_steps_count"),
    "takes_strays": Fault("parameters_of_no_module_train_alike"),
    "forgets_writes": Fault("weights_written_in_forward_count"),
    "draws_from_its_own_seed": Fault("weights_can_be_drawn_anew"),
    "puts_its_own_back": Fault("exchanged_parameters_count"),
    "holds_on": Fault("teardown_lets_go_of_the_module"),
    # what setup leaves alone
    "drops_the_optimizer": Fault("optimizer_made_before_or_after_setup"),
    "forgets_state": Fault("optimizer_state_moves_along"),
    "copies_optimizers": Fault("optimizers_stay_the_same_objects"),
    "levels_groups": Fault("param_groups_keep_their_settings"),
    "breaks_ties": Fault("ties_stay_tied"),
    "thaws": Fault("frozen_parameters_stay_frozen"),
    "trains_the_unfrozen_alone": Fault("unfrozen_parameters_train"),
    "divides_sparse_twice": Fault("sparse_embeddings_train"),
    "forgets_buffers": Fault("buffers_are_right"),
    "resets_learning_rate": Fault("schedulers_count_steps_once"),
    # what ranks have copies of
    "sends_nothing": Fault("starts_from_rank_zero"),
    "sends_parameters_only": Fault("starts_from_rank_zero"),
    "shows_its_own_buffers": Fault("changed_buffers_are_of_one_rank"),
    # what a strategy can do
    "one_optimizer_steps": Fault("two_optimizers"),
    "closure_once": Fault("closure_is_evaluated_again"),
    "refuses_by_name": Fault("any_optimizer_steps"),
    "averages_forwards_alone": Fault("entry_methods_run"),
    "boasts_meta_init": Fault("no_rank_builds_all"),
    # which dtype where
    "mixes_instead": Fault("precision_has_its_dtypes"),
    "shuns_a_precision": Fault("precision_has_its_dtypes"),
    "computes_in_full": Fault("mixed_precision_is_autocast"),
    "steps_on_overflow": Fault("overflow_skips_the_step_everywhere"),
    "scaled_norm": Fault("norms_are_unscaled"),
    "steps_silently": Fault("step_says_whether_it_stepped"),
    # what is random
    "seeds_anew": Fault("same_seed_same_weights"),
    "masks_alike": Fault("dropout_masks_differ_between_data_ranks"),
    "reseeds_alike": Fault("seeding_again_keeps_masks_apart"),
    "never_trains": Fault("dropout_drops_its_share"),
    "runs_anew": Fault("same_seed_same_run"),
    # who sees what
    "unshared_data": Fault("samples_are_shared_out"),
    "unshared_streams": Fault("streams_are_shared_by_batches"),
    "reads_ahead": Fault("streams_go_on_at_any_world_size", (1, 2)),
    "counts_fillers": Fault("metrics_count_every_sample_once"),
    "uneven_data": Fault("ranks_take_equally_many_steps"),
    # how ranks talk
    "max_is_sum": Fault("all_reduce_has_its_operations"),
    "rank_dependent": Fault("results_are_alike_on_all_ranks"),
    "reduces_in_place": Fault("all_reduce_leaves_its_input"),
    "reduces_nothing": Fault("reduces_tensors_only"),
    "returns_local_values": Fault("reduces_structures"),
    "gathers_backwards": Fault("gathers_in_rank_order"),
    "drops_sync_grads": Fault("gathers_with_gradients"),
    "hides_sync_grads": Fault("gathers_with_gradients"),
    "broadcasts_from_zero": Fault("broadcasts_objects"),
    "gathers_its_own_object": Fault("gathers_objects"),
    "never_waits": Fault("barrier_waits"),
    "unknown_is_mean": Fault("wrong_operation_is_refused"),
    # what is kept
    "drops_moments": Fault("moments_come_back"),
    "forgets_random_numbers": Fault("random_numbers_go_on"),
    "groups_by_position": Fault("groups_come_back_by_name"),
    "forgets_empty_groups": Fault("empty_groups_come_back"),
    "rounds_a_tensor": Fault("round_trip_is_bitwise"),
    "one_size_only": Fault("loads_at_another_world_size", (1, 2)),
    "never_strict": Fault("strict_names_every_difference"),
    "always_strict": Fault("not_strict_takes_what_fits"),
    "fills_before_refusing": Fault("mismatch_changes_nothing"),
    "skips_a_weight": Fault("weights_of_others_fill_the_module"),
    "averages_copies": Fault("averages_are_of_weights"),
    "ignores_filter": Fault("filter_keeps_what_it_names"),
    "keeps_values": Fault("plain_values_come_back"),
    "whole_everywhere": Fault("state_dicts_are_whole"),
    "keeps_its_first_look": Fault("every_state_dict_is_of_its_moment"),
    "saves_its_first_save": Fault("every_state_dict_is_of_its_moment"),
    "hands_out_what_trains": Fault("every_state_dict_is_of_its_moment"),
    "counts_steps_together": Fault("steps_are_counted_for_each_parameter"),
    "removes_the_old": Fault("killed_save_leaves_the_old_or_the_new"),
    "loads_damaged": Fault("corrupted_byte_is_named"),
    "writes_pickle": Fault("holds_no_pickle"),
    "saves_later": Fault("background_save_is_of_its_moment"),
    "hushes_failures": Fault("failed_background_save_is_raised"),
    # who runs
    "last_rank_returns": Fault("launch_returns_rank_zeros_result"),
    "swallows_exceptions": Fault("failing_rank_is_reported"),
    "leaves_with_three": Fault("exit_code_is_zero"),
    "stays_here": Fault("functions_that_cannot_travel_are_refused"),
}

#: Judged in every run, by the suite of the promise that names the fault, and at least one by each kind of suite; the
#: others wait for the long run, as does the rest of the kit, since each costs seconds.
_ALWAYS = (
    *("imports_torch", "swallows_exceptions", "local_norm", "returns_local_values", "drops_moments"),
    "takes_strays",
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


@pytest.mark.long
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
    assert {_suite_of(fault.promise) for fault in ROGUES.values()} == set(map(_suite_of, promises_of(Conformance)))


def test_every_kind_of_suite_finds_one_in_every_run() -> None:
    assert {_kind_of(ROGUES[rogue].promise) for rogue in _ALWAYS} == set(map(_kind_of, promises_of(Conformance)))


def _kind_of(promise: str) -> str:
    return _suite_of(promise).partition(".")[0]


def _asks(item: pytest.Item, fixture: str) -> bool:
    return fixture in getattr(item, "fixturenames", ())


def _short_trial(rogue: str) -> Trial:
    if rogue == "honest":
        return Trial(suites=("",), spared=_SLOW)
    fault = ROGUES[rogue]
    spared = tuple(name for name in _SLOW if name != fault.promise)
    return Trial(suites=(_suite_of(fault.promise),), spared=spared, world_sizes=fault.world_sizes)


def _long_trial(rogue: str) -> Trial:
    if rogue == "honest":
        return Trial(suites=("",), world_sizes=(1, 2, 3))
    fault = ROGUES[rogue]
    spared = () if _suite_of(fault.promise) == "launcher" else _SCRIPTS
    return Trial(suites=("",), spared=spared, world_sizes=fault.world_sizes)


def _suite_of(promise: str) -> str:
    """Return where a promise stands, such as ``training.clipping``."""
    module: str = getattr(Conformance, f"test_{promise}").__module__
    return module.removeprefix("shard_core.testing.suites.")


def _broken(outcomes: Mapping[str, str]) -> dict[str, str]:
    return {name: how for name, how in outcomes.items() if how not in ("", "not judged")}


def _assert_found_out(outcomes: Mapping[str, str], promise: str) -> None:
    broken = _broken(outcomes)
    assert set(broken) == {promise}, "\n\n".join(f"{name}: {how}" for name, how in broken.items()) or "all is kept"
