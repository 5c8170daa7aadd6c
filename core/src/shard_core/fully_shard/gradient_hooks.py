"""Hooks on the gradients of parameters, which users register on shards and autograd calls on what computes."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from shard_core._versions import gradient_hooks, shards_and_unsharded
from shard_core.gradients import call_hooks, move_hooks
from shard_core.parameters import plain_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from shard_core.gradients import Hooks
    from shard_core.parameters import ParameterNames


class GradientHooks:
    """Has whole gradients go through the hooks that users put on parameters before setup, and on shards after it.

    What a unit computes with is one tensor for each parameter in all its forwards, made by the first; autograd adds up
    what a backward leaves there, and calls its hooks, as it does in plain PyTorch for the parameter.

    Args:
        module: A module that was sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # which holds this
        self._relays: dict[torch.Tensor, _Relay] = {}

    def move(self, names: ParameterNames) -> None:
        """Move hooks of parameters to the shards that setup has made of them.

        Args:
            names: The parameters of before.
        """
        module = self._module()
        assert module is not None
        now = {plain_name(name): each for name, each in module.named_parameters(remove_duplicate=False)}
        for parameter in names.parameters():
            if now[names.of(parameter)] is not parameter:
                move_hooks(parameter, now[names.of(parameter)], _call_with_whole)

    def follow(self) -> None:
        """Have gradients go through the hooks that shards have now; a backward may come next."""
        module = self._module()
        for part in () if module is None else _units(module):
            for shard, unsharded in shards_and_unsharded(part):
                if not gradient_hooks(shard) or unsharded is None:
                    continue
                if unsharded in self._relays:
                    self._relays[unsharded].shard = shard
                elif unsharded.requires_grad:
                    self._relays[unsharded] = _Relay(shard)
                    unsharded.register_hook(self._relays[unsharded])


class _Relay:
    """Calls the hooks that a shard has with the gradient of what computes.

    Attributes:
        shard: The parameter as users have it.
    """

    def __init__(self, shard: torch.Tensor) -> None:
        self.shard = shard

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        hooks = gradient_hooks(self.shard)
        return _call_with_whole(hooks, gradient) if hooks else None


def _call_with_whole(hooks: Hooks, gradient: torch.Tensor) -> torch.Tensor:
    """Call hooks with the whole of a gradient, of which every rank that shares a layer may have a part."""
    if not isinstance(gradient, DTensor):
        return call_hooks(hooks, gradient)
    # All of these ranks come here, and in the same order.
    changed = call_hooks(hooks, gradient.full_tensor())
    placements = [Replicate() if isinstance(each, Partial) else each for each in gradient.placements]
    return distribute_tensor(changed, gradient.device_mesh, placements, src_data_rank=None)


def _units(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))
