"""Which settings may train a model faster, for ``shard tune`` to measure."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from shard_deepspeed.config import DeepSpeedConfig

_ELEMENTS = (500_000, 5_000_000, 50_000_000)
_KEPT_WHOLE = (0, 10_000, 1_000_000)


def worth_trying(
    config: DeepSpeedConfig, module: nn.Module, world_size: int, *, overlaps: bool
) -> Generator[Sequence[Mapping[str, Any]], Mapping[str, Any], None]:
    """Propose sizes of messages, and at stage 3 what stays whole; then when they are sent.

    Args:
        config: What the user has chosen; the stage is kept.
        module: The user's, not set up.
        world_size: On how many ranks it will be trained.
        overlaps: Whether the device can send and compute at once, which is all that stage 3 makes of ``overlap_comm``.

    Yields:
        Settings; the best so far is sent back.
    """
    if world_size == 1 or not config.zero_stage:
        return
    whole = sum(parameter.numel() for parameter in module.parameters())
    sizes = [size for size in (*_ELEMENTS, whole) if size <= whole and size < config.reduce_bucket_size]
    settings: list[dict[str, Any]] = [{"reduce_bucket_size": size} for size in sizes]
    if config.zero_stage == 3:
        largest = max(parameter.numel() for parameter in module.parameters())
        kept = [size for size in _KEPT_WHOLE if size <= largest]
        settings += [{"param_persistence_threshold": size} for size in kept]
    best = yield settings
    if overlaps or config.zero_stage != 3:
        yield [{**best, "overlap_comm": not config.overlap_comm}]
