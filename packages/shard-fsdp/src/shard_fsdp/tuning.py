"""Which settings may train a model faster, for ``shard tune`` to measure."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shard_core.backend import find_units, unit_sizes

if TYPE_CHECKING:
    from torch import nn

    from shard_fsdp.config import FSDPConfig

#: With fewer, gathering two of them ahead is gathering the model.
_MANY_UNITS = 6


def worth_trying(
    config: FSDPConfig, module: nn.Module, world_size: int
) -> Generator[Sequence[Mapping[str, Any]], Mapping[str, Any], None]:
    """Propose units with and without resharding, then prefetching on the best of them.

    Args:
        config: What the user has chosen.
        module: The user's, not set up.
        world_size: On how many ranks it will be trained.

    Yields:
        Settings; the best so far is sent back.
    """
    if world_size == 1:
        return
    by_policy = config.auto_wrap_policy is not None
    sizes = [config.unit_bytes] if by_policy else unit_sizes(module, config.unit_bytes)
    layouts = []
    for size in sizes:
        layouts.append({"unit_bytes": size})
        # The root's parameters are kept anyway.
        if config.reshards is None and (by_policy or find_units(module, size)):
            layouts.append({"unit_bytes": size, "reshard_after_forward": False})
    best = yield layouts
    units = find_units(module, best.get("unit_bytes", config.unit_bytes))
    if by_policy or units:
        early = config.backward_prefetch == "backward_pre"
        ahead: list[Mapping[str, Any]] = [
            {"forward_prefetch": not config.forward_prefetch},
            {"backward_prefetch": None if early else "backward_pre"},
        ]
        if len(units) >= _MANY_UNITS:
            ahead.append({"forward_prefetch": 2, "backward_prefetch": 2})
        yield [{**best, **each} for each in ahead]
