"""What silent rogues say about themselves: what ddp says; pure data."""

from __future__ import annotations

import dataclasses

from shard_core.plugins import StrategyInfo, hookimpl
from shard_core.strategies.plugin import DDP


@hookimpl
def shard_strategy(name: str) -> StrategyInfo:
    return dataclasses.replace(DDP, name=name, summary=name.replace("_", " "), factory=FACTORIES[name])


def _at(module: str, *names: str) -> dict[str, str]:
    return {name: f"silent.{module}:{name.title().replace('_', '')}" for name in names}


#: Where each rogue's class stands.
FACTORIES = {
    **_at("clipping", "counts_copies", "scales_by_parts", "largest_is_length"),
    **_at("stepping", "levels_rates", "levels_decay", "keeps_first_rate", "minimizes", "couples_decay"),
    **_at("stepping", "forgets_nesterov", "steps_the_unused", "closes_locally", "takes_signs"),
    **_at("gradients", "leaves_deferred_local", "averages_last_twice", "drops_deferred_unused", "own_denominator"),
    **_at("gradients", "weighs_batches_alike", "keeps_denominators", "keeps_frozen_gradients"),
    **_at("loading", "forgets_tied_moments", "restarts_count", "restores_one_generator", "thaws_on_load"),
    **_at("loading", "saves_last_ranks_buffers"),
    **_at("evading", "refuses_without_momentum", "refuses_at_half_the_rate", "refuses_everything", "rounds_float32"),
    **_at("evading", "refuses_to_clip", "shows_doubles", "shows_weights_everywhere", "loses_checkpoints"),
    **_at("evading", "holds_modules", "refuses_without_gradients", "refuses_once_frozen", "refuses_seeded"),
    **_at("evading", "refuses_in_many_words", "steps_no_more_once_refused"),
    **_at("forwards", "seeds_alike", "masks_alike", "scales_evaluation", "keeps_own_buffers"),
}
