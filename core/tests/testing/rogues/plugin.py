"""What the rogues say about themselves: what ddp says, but for those who lie; pure data."""

from __future__ import annotations

import dataclasses
from typing import Any

from shard_core.capability import Capability
from shard_core.options import Option
from shard_core.plugins import StrategyInfo, hookimpl
from shard_core.strategies.plugin import DDP

#: What a rogue says differently from ddp.
_METADATA: dict[str, dict[str, Any]] = {
    "silent_option": {"options": (*DDP.options, Option(name="speed", type="int", default=1, help=""))},
    # ddp refuses parameters without a gradient unless it is asked to look for them.
    "fills_missing_gradients": {"presets": {"find_unused_parameters": True}},
    "averages_over_users": {"presets": {"find_unused_parameters": True}},
    "counts_steps_together": {"presets": {"find_unused_parameters": True}},
    "boasts_meta_init": {"capabilities": DDP.capabilities | {Capability.META_INIT}},
    "takes_what_comes": {"capabilities": frozenset(Capability) - {Capability.META_INIT, Capability.CPU_OFFLOAD}},
    "defers_in_silence": {"capabilities": DDP.capabilities - {Capability.DEFER_SYNC}},
    "repeats_itself": {"capabilities": DDP.capabilities - {Capability.DEFER_SYNC}},
    "refuses_to_defer": {"capabilities": DDP.capabilities - {Capability.DEFER_SYNC}},
    "hides_clip_value": {"capabilities": DDP.capabilities - {Capability.CLIP_VALUE}},
    "refuses_by_name": {"capabilities": DDP.capabilities - {Capability.ANY_OPTIMIZER}},
    "hides_sync_grads": {"capabilities": DDP.capabilities - {Capability.SYNC_GRADS}},
}


@hookimpl
def shard_strategy(name: str) -> StrategyInfo:
    return dataclasses.replace(
        DDP, **{"name": name, "summary": name.replace("_", " "), "factory": FACTORIES[name], **_METADATA.get(name, {})}
    )


@hookimpl
def shard_unavailable(name: str) -> str | None:
    return "" if name == "shrugs" else None


def _at(module: str, *names: str) -> dict[str, str]:
    return {name: f"rogues.{module}:{name.title().replace('_', '')}" for name in names}


#: Where each rogue's class stands.
FACTORIES = {
    **_at("lifecycle", "honest", "starts_at_once", "lacks_a_member", "seeds_anew", "masks_alike", "runs_anew"),
    **_at("lifecycle", "reseeds_alike", "shuns_a_precision", "holds_on"),
    **_at("setup", "drops_the_optimizer", "forgets_state", "copies_optimizers", "levels_groups", "breaks_ties"),
    **_at("setup", "thaws", "forgets_buffers", "never_trains", "one_optimizer_steps", "loses_hooks"),
    **_at("setup", "refuses_by_name"),
    **_at("setup", "unshared_data", "unshared_streams", "reads_ahead", "uneven_data"),
    **_at("step", "summed", "rescaled", "fills_missing_gradients", "loses_deferred", "defers_nothing"),
    **_at("step", "ignores_denominator", "local_denominator", "local_norm", "never_clips", "always_two_norm"),
    **_at("step", "takes_newcomers", "cuts_off_objects", "assigns_outside"),
    **_at("step", "ignores_gradient", "averages_forwards_alone", "trains_the_unfrozen_alone"),
    **_at("step", "defers_in_silence", "repeats_itself", "refuses_to_defer", "steps_inside"),
    **_at("step", "averages_over_users", "returns_to_the_forward", "drops_the_clipped", "keeps_denominators"),
    **_at("step", "ignores_clip_value", "passes_non_finite", "scaled_norm", "resets_learning_rate"),
    **_at(
        "step",
        "keeps_weights",
        "steps_silently",
        "steps_on_overflow",
        "closure_once",
        "computes_in_full",
        "mixes_instead",
    ),
    **_at("custom_steps", "cuts_second_derivatives", "takes_assigned_gradients", "keeps_half_of_a_backward"),
    **_at("custom_steps", "keeps_what_a_failed_forward_gathered", "takes_strays", "counts_nothing_for_none"),
    **_at("custom_steps", "hooks_see_old_weights", "forgets_writes", "draws_from_its_own_seed", "puts_its_own_back"),
    **_at("replicating", "sends_nothing", "sends_parameters_only", "shows_its_own_buffers", "divides_sparse_twice"),
    **_at("replicating", "averages_the_named_alone"),
    **_at("collectives", "max_is_sum", "rank_dependent", "reduces_in_place", "reduces_nothing", "gathers_backwards"),
    **_at("collectives", "drops_sync_grads", "broadcasts_from_zero", "never_waits", "unknown_is_mean"),
    **_at("collectives", "returns_local_values", "gathers_its_own_object", "counts_fillers"),
    **_at(
        "checkpointing",
        "drops_moments",
        "groups_by_position",
        "forgets_random_numbers",
        "rounds_a_tensor",
        "never_strict",
        "always_strict",
    ),
    **_at("checkpointing", "fills_before_refusing", "ignores_filter", "keeps_values", "whole_everywhere"),
    **_at("checkpointing", "removes_the_old", "loads_damaged", "writes_pickle", "one_size_only"),
    **_at("checkpointing", "forgets_empty_groups", "saves_later", "hushes_failures", "skips_a_weight"),
    **_at("state_dict", "keeps_its_first_look", "saves_its_first_save", "counts_steps_together", "shows_sums"),
    **_at("state_dict", "averages_copies", "hands_out_what_trains"),
    **_at("launching", "last_rank_returns", "swallows_exceptions", "leaves_with_three", "stays_here"),
    **dict.fromkeys(("boasts_meta_init", "takes_what_comes"), "rogues.lifecycle:Honest"),
    **dict.fromkeys(("silent_option", "imports_torch", "names_no_versions", "shrugs"), "rogues.lifecycle:Honest"),
    **dict.fromkeys(("hides_clip_value", "hides_sync_grads"), "rogues.lifecycle:TellsLess"),
}
