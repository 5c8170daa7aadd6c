"""What gradients still need before they are final: a denominator, unscaling, and agreement on overflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shard_core.errors import InvalidOption, SetupError
from shard_core.gradients import LocalGradient, all_finite, scale

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shard_core.collectives.interface import Collectives
    from shard_core.mesh import DataRanks
    from shard_core.precision.scaler import GradientScaler


class Accumulation:
    """The gradients of one optimizer between two of its steps.

    Engines average over data-parallel ranks; a denominator turns that average into the global mean,
    and a scaler's factor is taken out, once, when the gradients are first used.
    """

    def __init__(self) -> None:
        self._denominator: torch.Tensor | None = None
        self._loss_scale = 1.0
        self._backwards = 0
        self._shown = False
        self._final = False
        self._finite = True

    def add(self, denominator: float | torch.Tensor | None, loss_scale: float) -> None:
        """Record one backward.

        Args:
            denominator: What the loss of this micro-batch is a sum over, on this rank.
            loss_scale: What the loss was multiplied by.

        Raises:
            SetupError: If the gradients were clipped or unscaled already and not stepped since.
            InvalidOption: If only some micro-batches of a step have a denominator.
        """
        if self._final:
            raise SetupError(
                "backward() after clipping would mix finished with unfinished gradients; call "
                "optimizer_step() and zero_grad() first, and clip only after the last micro-batch."
            )
        if self._backwards and (self._denominator is None) != (denominator is None):
            raise InvalidOption(
                "some micro-batches of this step have a denominator and some have none; pass denominator= "
                "to every backward() of a step, or to none."
            )
        self._backwards += 1
        self._loss_scale = loss_scale
        if denominator is not None:
            count = torch.as_tensor(denominator, dtype=torch.float64).detach()
            self._denominator = count if self._denominator is None else self._denominator + count

    def finish(
        self,
        gradients: Callable[[], Sequence[LocalGradient]],
        collectives: Collectives,
        data: DataRanks,
        scaler: GradientScaler | None,
    ) -> bool:
        """Compute the final values of the gradients, in place and once.

        Args:
            gradients: Returns this rank's parts, to be changed in place.
            collectives: Of all ranks.
            data: The ranks whose denominators add up.
            scaler: The gradient scaler, if the precision has one.

        Returns:
            Whether every gradient on every rank is finite; always True without a scaler.
        """
        if self._final:
            return self._finite
        self._final = True
        factor = 1.0 / self._loss_scale
        if self._denominator is not None:
            total = float(collectives.all_reduce(self._denominator, data.group, "sum"))
            if total <= 0:
                raise InvalidOption(
                    f"the denominators of this step add up to {total:g} over all ranks and micro-batches; "
                    "they must be counts above zero."
                )
            factor *= data.size / total
        if factor != 1.0:
            scale(gradients(), factor)
        if scaler is not None:
            self._finite = not collectives.any_true(not all_finite(gradients()))
        return self._finite

    def note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Record, after a backward, whether there are gradients to be seen: an engine may have deferred them.

        Args:
            optimizer: Whose gradients.
        """
        self._shown = _has_gradients(optimizer)

    def reset_if_discarded(self, optimizer: torch.optim.Optimizer) -> None:
        """Reset if the gradients of earlier backwards were to be seen and are gone without a step.

        Args:
            optimizer: Whose gradients.
        """
        if self._shown and not _has_gradients(optimizer):
            self.reset()

    def reset(self) -> None:
        """Forget all backwards, as after a step."""
        self._denominator = None
        self._loss_scale = 1.0
        self._backwards = 0
        self._shown = False
        self._final = False
        self._finite = True


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
