"""Finds gradients that each rank has scaled by a factor of its own, as torch's clipping by norm does with shards."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from shard_core import SetupError
from shard_xla._versions import changes_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shard_core.backend import Collectives

_PARAMETERS, _ELEMENTS = 3, 32
"""How much of the gradients is kept to compare: a slice of a few, which costs no memory to speak of."""
_ROUNDING = 1e-4


class _Noted(NamedTuple):
    """A shard, its gradient, how often that was changed in place, and some of its elements."""

    shard: torch.Tensor
    gradient: weakref.ref[torch.Tensor]
    changes: int
    sample: torch.Tensor


class ScaledShards:
    """What gradients were when a backward or a step had ended, until they are used.

    Scaling all gradients by one number is right on shards, and so is what looks at each element alone; a number that
    comes from the norm of a rank's own shards is another on every rank.
    """

    def __init__(self) -> None:
        self._noted: list[_Noted] = []
        self._stepped = False

    def note(self, parameters: Iterable[torch.Tensor], *, stepped: bool) -> None:
        """Note the gradients there are.

        Args:
            parameters: Shards, the same on every rank.
            stepped: Whether they have been stepped with, so that they are likely to be zeroed next.
        """
        self._stepped = stepped
        found = [(each, each.grad) for each in parameters if each.grad is not None]
        chosen = found[:: math.ceil(len(found) / _PARAMETERS) or 1]
        self._noted = [_noted(each, gradient) for each, gradient in chosen]

    def check(self, collectives: Collectives, *, adds: bool = False) -> None:
        """Check that no rank has scaled what was noted by a factor of its own, and note anew; every rank calls this.

        Nothing is computed, and nothing sent, where nothing was changed since.

        Args:
            collectives: Of all ranks.
            adds: Whether a backward is to add to them: what has been stepped with is taken for zeroed then, as to look
                would end the graph in every step.

        Raises:
            SetupError: If ranks have.
        """
        kept = [(each, each.shard.grad) for each in self._noted if each.shard.grad is not None]
        if (adds and self._stepped) or all(
            now is each.gradient() and changes_of(now) == each.changes for each, now in kept
        ):
            return
        now, then = torch.cat([_sample(gradient) for _, gradient in kept]), torch.cat([each.sample for each, _ in kept])
        mine = _factor(now.cpu(), then.cpu())
        self._noted = [_noted(each.shard, gradient) for each, gradient in kept]
        factors = [each for each in collectives.gather_objects(mine) if each is not None]
        if factors and max(factors) - min(factors) > _ROUNDING * max(map(abs, factors)):
            raise SetupError(
                "ranks have scaled their shards of the gradients by different factors, as "
                "torch.nn.utils.clip_grad_norm_ does by the norm of each rank's own; call "
                "strategy.clip_gradients_norm(model, optimizer, max_norm), and begin the step anew."
            )


def _noted(shard: torch.Tensor, gradient: torch.Tensor) -> _Noted:
    return _Noted(shard, weakref.ref(gradient), changes_of(gradient), _sample(gradient))


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    """Copy some elements from all over a gradient."""
    flat = gradient.detach().flatten()
    return flat[:: math.ceil(flat.numel() / _ELEMENTS) or 1].clone()


def _factor(now: torch.Tensor, then: torch.Tensor) -> float | None:
    """Return what all elements were multiplied by; None if that is not one number."""
    factors = (now / then)[then != 0].double()
    if not factors.numel() or not bool(factors.isfinite().all()):
        return None
    least, most = factors.min().item(), factors.max().item()
    return most if most - least <= _ROUNDING * max(abs(least), abs(most)) else None
