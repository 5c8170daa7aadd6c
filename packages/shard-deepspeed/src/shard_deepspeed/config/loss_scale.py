"""Options of the gradient scaler, by which float16 losses are multiplied."""

from __future__ import annotations

import dataclasses
import math

from shard_core import InvalidOption
from shard_core.plugins import option

_LEAST = {"initial_scale_power": 0, "loss_scale_window": 1, "hysteresis": 1, "min_loss_scale": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaleOptions:
    """What DeepSpeed's ``fp16`` section says of the factor; where an option is None, it is as under every strategy.

    Raises:
        InvalidOption: If a value makes no sense.

    Example:
        >>> LossScaleOptions(loss_scale=128.0).adaptive_given
        ()
        >>> LossScaleOptions(hysteresis=2).adaptive_given
        ('hysteresis',)
    """

    loss_scale: float = option(0, "16-mixed and 16-true: a fixed factor for losses; 0 adapts it")
    initial_scale_power: int | None = option(
        None, "16-mixed and 16-true: the adaptive factor begins at 2 to this power; None is 16, in 16-true 15"
    )
    loss_scale_window: int | None = option(
        None, "16-mixed and 16-true: clean steps until the adaptive factor is doubled; None is 2000"
    )
    hysteresis: int | None = option(
        None, "16-mixed and 16-true: overflows until the adaptive factor is halved; None is 1"
    )
    min_loss_scale: float | None = option(
        None, "16-mixed and 16-true: the least the adaptive factor becomes, where an overflow ends the run; None is 0"
    )

    def __post_init__(self) -> None:
        """Check values."""
        if not _is_number(self.loss_scale):
            raise InvalidOption(f"loss_scale is {self.loss_scale!r}; give a positive factor, or 0 to adapt it.")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            whole = name == "min_loss_scale" or isinstance(value, int)
            if value is not None and not (whole and _is_number(value) and value >= least):
                raise InvalidOption(f"{name} is {value!r}; give a number from {least} up.")
        if self.initial_scale_power is not None and self.initial_scale_power > 127:
            raise InvalidOption(
                f"initial_scale_power is {self.initial_scale_power!r}; give a number from 0 to 127: float32 holds no "
                "greater power of 2."
            )

    @property
    def adaptive_given(self) -> tuple[str, ...]:
        """Return which options of an adaptive factor were given."""
        defaults = {field.name: field.default for field in dataclasses.fields(LossScaleOptions)}
        return tuple(name for name in _LEAST if getattr(self, name) != defaults[name])

    @property
    def loss_scale_given(self) -> tuple[str, ...]:
        """Return which of all these options were given."""
        return (("loss_scale",) if self.loss_scale else ()) + self.adaptive_given


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
