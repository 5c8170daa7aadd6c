"""State that an optimizer makes when it is made, of parameters whose values were spread over ranks by then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shard_core import SetupError
from shard_deepspeed import _versions


def late_state(
    optimizer: torch.optim.Optimizer, parts: Mapping[int, torch.Tensor]
) -> dict[torch.Tensor, dict[str, Any]]:
    """Compute an optimizer's first state over parts, where it has made it of parameters with nothing in them.

    What is frozen has no part; its state is whole, as that of an optimizer made before setup.

    Args:
        optimizer: Over a module's parameters; it is left as it is.
        parts: This rank's, by the ids of the parameters.

    Returns:
        State by part, or by frozen parameter.

    Raises:
        SetupError: If there is such state, and the optimizer may depend on more than the settings of its groups.
    """
    emptied = {each: slot for each, slots in optimizer.state.items() for slot in _without_values(slots)}
    emptied = {each: slot for each, slot in emptied.items() if id(each) in parts or _is_emptied(each)}
    if not emptied:
        return {}
    kind: Any = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        raise SetupError(
            f"this {kind.__name__} has made its state {next(iter(emptied.values()))!r} of parameters whose values "
            "stage 3 has spread over ranks, and there is nothing in it; make the optimizer before setup and give both "
            "to setup_module_and_optimizers()."
        )
    frozen = {id(each): each.new_empty(_versions.full_shape(each)) for each in emptied if id(each) not in parts}
    instead = {**parts, **frozen}
    groups = [
        {**group, "params": [instead.get(id(each), each) for each in group["params"]]}
        for group in optimizer.param_groups
    ]
    anew = kind(groups, **optimizer.defaults)
    return {parts.get(id(each), each): anew.state[instead[id(each)]] for each in emptied}


def _is_emptied(parameter: torch.Tensor) -> bool:
    return not parameter.numel() and parameter.shape != _versions.full_shape(parameter)


def _without_values(slots: Mapping[str, Any]) -> list[str]:
    return [slot for slot, value in slots.items() if isinstance(value, torch.Tensor) and not value.numel()]
