"""Hooks on the gradients of parameters, which users register on shards and autograd calls on what computes."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from shard_core._versions import gradient_hooks, shards_and_unsharded
from shard_core.errors import SetupError
from shard_core.fully_shard.units import sharded_parts
from shard_core.gradients import MovedHooks, call_hooks, move_hooks
from shard_core.parameters import plain_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn
    from torch.distributed.tensor import Placement

    from shard_core.gradients import Hooks
    from shard_core.parameters import ParameterNames


class GradientHooks:
    """Routes whole gradients through the hooks that users put on parameters before setup, and on shards after it.

    What a unit computes with is one tensor for each parameter in all its forwards, made by the first; autograd adds up
    what a backward leaves there, and calls its hooks, as it does in plain PyTorch for the parameter.

    Args:
        module: A module that was sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # which holds this
        self._relays: dict[torch.Tensor, _Relay] = {}
        self._guarded: set[torch.Tensor] = set()

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
        self.begin_backward()

    def begin_backward(self) -> None:
        """Attach the hooks that shards have now to what computes, and ours to shards, when a backward begins."""
        module = self._module()
        parts = () if module is None else sharded_parts(module)
        for shard, unsharded in itertools.chain.from_iterable(map(shards_and_unsharded, parts)):
            if shard.requires_grad and shard not in self._guarded:
                _Guard.put_on(shard)
                self._guarded.add(shard)
            if _left(shard):
                self._follow(shard, unsharded)

    def _follow(self, shard: torch.Tensor, unsharded: torch.Tensor | None) -> None:
        if unsharded in self._relays:
            self._relays[unsharded].shard = shard
        elif unsharded is not None and unsharded.requires_grad:
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
        hooks = _left(self.shard)
        return _call_with_whole(hooks, gradient) if hooks else None


class _Guard:
    """Lays out, as a hook of a shard, a gradient that comes past the units, a penalty's, as the shard is.

    It may come whole, and torch cannot add that in place to a shard of fewer rows than there are ranks. It is not all
    of the gradient, so users' hooks refuse it.
    """

    __torch_unserializable__ = True  # or torch warns where users save the shard

    def __init__(self) -> None:
        self._hooks: Hooks = {}
        self._placements: Sequence[Placement] | None = None

    @classmethod
    def put_on(cls, shard: torch.Tensor) -> None:
        """Register one on a shard, to which it keeps no reference: torch casts and moves none with a weak one."""
        guard = cls()
        shard.register_hook(guard)
        guard._hooks = gradient_hooks(shard)
        guard._placements = shard.placements if isinstance(shard, DTensor) else None

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if _users(self._hooks):
            raise SetupError(
                f"the loss reads a parameter of shape {tuple(gradient.shape)} outside the module's forward, and a hook "
                "on its gradient would see that part of it apart from the other; compute that part of the loss inside "
                "forward, or remove the hook."
            )
        if self._placements is None or not isinstance(gradient, DTensor):
            return None
        return gradient.redistribute(placements=self._placements)


def _left(shard: torch.Tensor) -> Hooks:
    """Return the hooks of a shard that users have not removed."""
    return _users(gradient_hooks(shard))


def _users(hooks: Hooks) -> Hooks:
    return {
        number: hook
        for number, hook in hooks.items()
        if not isinstance(hook, _Guard) and (not isinstance(hook, MovedHooks) or hook)
    }


def _call_with_whole(hooks: Hooks, gradient: torch.Tensor) -> torch.Tensor:
    """Call hooks with the whole of a gradient, of which every rank that shares a layer may have a part."""
    if not isinstance(gradient, DTensor):
        return call_hooks(hooks, gradient)
    # All of these ranks come here, and in the same order.
    changed = call_hooks(hooks, gradient.full_tensor())
    placements = [Replicate() if isinstance(each, Partial) else each for each in gradient.placements]
    return distribute_tensor(changed.contiguous(), gradient.device_mesh, placements, src_data_rank=None)
