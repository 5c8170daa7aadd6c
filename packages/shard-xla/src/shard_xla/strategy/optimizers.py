"""Optimizers at the tensors that setup made: re-pointed to them by name, with the state they have."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shard_core import SetupError
from shard_xla.checkpoint import flat_part
from shard_xla.strategy import spmd_sharding

if TYPE_CHECKING:
    from torch import nn
    from torch_xla.distributed.spmd import Mesh

    from shard_core.backend import ParameterNames
    from shard_xla.strategy.module_tensors import ModuleTensors

    Optimizers = Sequence[torch.optim.Optimizer]

COUNTER = "step"
"""What torch's optimizers call a number of steps, which stays as it is; a parameter without dims has others alike."""


def repoint_to_shards(optimizers: Optimizers, names: ParameterNames, own: ModuleTensors, rank: int) -> None:
    """Point optimizers at this rank's flat shards of the parameters they held."""
    names.repoint(optimizers, own.parameters, functools.partial(flat_value, own, rank))


def repoint_to_devices(optimizers: Optimizers, names: ParameterNames, own: ModuleTensors, mesh: Mesh) -> None:
    """Point optimizers at the parameters that XLA spreads over the devices of a mesh."""
    names.repoint(optimizers, own.parameters, functools.partial(spread_value, mesh))


def flat_value(own: ModuleTensors, rank: int, shard: torch.Tensor, slot: str, value: Any) -> Any:
    """Slice a rank's part out of optimizer state that was made for whole parameters."""
    whole = next((own.shape_of(name) for name, place in own.places.items() if place.tensor is shard), None)
    if not isinstance(value, torch.Tensor) or slot == COUNTER or tuple(value.shape) != whole:
        return value
    return flat_part(value.to(shard.dtype) if value.is_floating_point() else value, shard, rank=rank)


def spread_value(mesh: Mesh, parameter: torch.Tensor, slot: str, value: Any) -> Any:
    """Shard optimizer state that was made on the host."""
    if not isinstance(value, torch.Tensor) or slot == COUNTER or (value.dim() == 0 and parameter.dim() > 0):
        return value
    there = value.to(parameter.device, parameter.dtype if value.is_floating_point() else value.dtype)
    return spmd_sharding.shard_tensor(there, mesh) if value.shape == parameter.shape else there


def check_stale_parameters(strategy: str, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> None:
    """Refuse an optimizer that was given parameters as they were before setup: nothing would ever train them.

    Args:
        strategy: The strategy's name, for the message.
        optimizer: About to step.
        modules: All that were set up.

    Raises:
        SetupError: If one of its parameters has no gradient and is none of theirs.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    resting = [parameter for parameter in held if parameter.grad is None]
    if not resting:
        return
    there = {id(parameter) for module in modules for parameter in module.parameters()}
    if not all(id(parameter) in there for parameter in resting):
        raise SetupError(
            f"this {type(optimizer).__name__} holds a parameter that no gradient reaches: strategy {strategy!r} makes "
            "other parameters of a module's; give add_param_group() what parameters() gives after setup."
        )
