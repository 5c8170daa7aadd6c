"""Gradient scaling for float16, agreed over all ranks."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from shard_core.errors import NonFiniteGradient

_LARGEST = (2 - 2**-23) * 2.0**127
"""The largest number of float32, in which losses are multiplied by the factor."""


@dataclasses.dataclass(kw_only=True)
class GradientScaler:
    """Keeps the factor that lifts small float16 gradients above zero.

    The schedule is that of "Mixed Precision Training" (Micikevicius et al., 2018, section 3.2) as in
    ``torch.amp.GradScaler``: halve after an overflow, double after ``growth_interval`` clean steps.
    The factor changes only when the next backward begins, so that several optimizers stepped after
    one another unscale by the factor their gradients were made with.

    Attributes:
        factor: What the loss is multiplied by.
        growth_factor: What ``factor`` is multiplied by after enough clean steps.
        backoff_factor: What it is multiplied by after a step with a non-finite gradient.
        growth_interval: How many clean steps in a row are enough.
        hysteresis: How many overflows it takes until ``factor`` goes down, counted anew whenever it has gone up; 1 is
            torch's schedule. Between two growths every overflow after the last of them lowers it, as DeepSpeed's
            ``DynamicLossScaler`` does.
        min_factor: The least ``factor`` becomes.

    Example:
        >>> scaler = GradientScaler(factor=8.0)
        >>> scaler.record(finite=False)
        >>> scaler.begin_backward()
        4.0
    """

    factor: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_factor: float = 0.0
    _clean_steps: int = 0
    _overflows: int = 0
    _outcomes: list[bool] = dataclasses.field(default_factory=list)

    def begin_backward(self) -> float:
        """Update the factor by the steps since the last backward.

        Returns:
            The factor to scale this backward's loss by.
        """
        if self._outcomes:
            if all(self._outcomes):
                self._clean_steps += 1
                if self._clean_steps >= self.growth_interval:
                    grown = self.factor * self.growth_factor
                    self.factor = grown if grown <= _LARGEST else self.factor
                    self._clean_steps = self._overflows = 0
            else:
                self._overflows += 1
                self._clean_steps = 0
                if self._overflows >= self.hysteresis:
                    self.factor = max(self.factor * self.backoff_factor, self.min_factor)
            self._outcomes.clear()
        return self.factor

    def record(self, *, finite: bool) -> None:
        """Record how an optimizer step went.

        Args:
            finite: Whether all gradients of all ranks were finite; the same on every rank.

        Raises:
            NonFiniteGradient: If they were not, and the factor would have to go below the least one: every later step
                would be skipped, too.
        """
        exhausted = self._overflows + 1 >= self.hysteresis and self.backoff_factor < 1.0
        if not finite and exhausted and self.factor <= self.min_factor:
            raise NonFiniteGradient(
                f"gradients overflow in float16 though losses are multiplied by {self.factor:g}, the least factor "
                "there is; look at the loss and the learning rate, or take 'bf16-mixed', which needs no factor."
            )
        self._outcomes.append(finite)

    def state_dict(self) -> dict[str, Any]:
        """Return the factor of the next backward and the counts behind it, and change neither.

        Between the steps of several optimizers this holds what they were so far, too: ``pending``.
        """
        after = copy.copy(self)
        after._outcomes = list(self._outcomes)
        after.begin_backward()
        state = after._counts()
        return {**state, "pending": {**self._counts(), "outcomes": list(self._outcomes)}} if self._outcomes else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        counts = state.get("pending", state)
        self.factor, self._clean_steps = float(counts["factor"]), int(counts["clean_steps"])
        self._overflows = int(counts.get("overflows", 0))
        self._outcomes = [bool(finite) for finite in counts.get("outcomes", ())]

    def _counts(self) -> dict[str, Any]:
        counts = {"factor": self.factor, "clean_steps": self._clean_steps}
        return counts if self.hysteresis == 1 else {**counts, "overflows": self._overflows}
