"""Optimizers over parts of parameters, and their state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shard_core.backend import COUNTERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shard_core.backend import FlatPart
    from shard_deepspeed.zero.trained_parameter import TrainedParameter


def adopt(optimizer: torch.optim.Optimizer, trained_parameters: Mapping[int, TrainedParameter]) -> None:
    """Replace parameters in an optimizer's groups by their parts, and cut what state there is of them.

    Args:
        optimizer: One that may have been given more of them, by ``add_param_group``.
        trained_parameters: By the ids of parameters.
    """
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            trained = trained_parameters.get(id(parameter))
            if trained is None or trained.part.values is parameter:
                continue
            part = trained.part
            group["params"][place] = part.values
            if parameter in optimizer.state:
                state = optimizer.state.pop(parameter)
                optimizer.state[part.values] = {slot: slice_state(slot, value, part) for slot, value in state.items()}


def slice_state(slot: str, value: Any, part: FlatPart) -> Any:
    """Slice a value of optimizer state to a part; what has not the parameter's shape is left alone."""
    is_count = slot in COUNTERS and not part.shape
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != part.shape or is_count:
        return value
    run = value.detach().reshape(-1)[part.start : part.start + part.values.numel()]
    return run.to(part.values.device, part.values.dtype if run.is_floating_point() else run.dtype, copy=True)
