"""What a module's parameter shows as its gradient while the gradient stands in parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shard_core import SetupError

aten = torch.ops.aten
_IN_PLACE = {
    *(aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.neg_.default, aten.sign_.default),
    *(aten.mul_.Tensor, aten.div_.Tensor, aten.add_.Tensor, aten.sub_.Tensor),
    *(aten.clamp_.default, aten.clamp_min_.default, aten.clamp_max_.default, aten.nan_to_num_.default),
}
"""What changes each element by itself, and by numbers that are the same for all."""
_MADE_ANEW = {
    *(aten.clone.default, aten.neg.default, aten.sign.default),
    *(aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor),
    *(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.nan_to_num.default),
}
"""The same, where the result is another gradient, for the user to assign."""


class GradientProxy(torch.Tensor):
    """A gradient's shape without its values: thrown away or changed alike everywhere, it is the part's; else refused.

    Without it ``p.grad`` of a module's parameter would be None between a backward and a step, and loops over gradients,
    and ``module.zero_grad()``, would do nothing and say nothing.

    Args:
        parameter: The module's, or another tensor of its shape and dtype.
        part: The optimizer's, whose gradient is meant.
        made: The part's share of what was computed from that gradient; None where the gradient itself is meant.
    """

    _plain: torch.Tensor
    _part: torch.Tensor
    _made: torch.Tensor | None
    _source: tuple[int, int] | None

    @staticmethod
    def __new__(
        cls: type[GradientProxy], parameter: torch.Tensor, part: torch.Tensor, made: torch.Tensor | None = None
    ) -> GradientProxy:
        """Allocate one element's memory, whatever the shape."""
        plain = parameter.detach().new_zeros(()).expand(parameter.shape)
        proxy = plain.as_subclass(cls)
        proxy._plain, proxy._part, proxy._made = plain, part, made
        proxy._source = None if made is None else _state(part)
        return proxy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is a stand-in that disables it
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply to the part's gradient what is the same element by element, by one number for all.

        Raises:
            SetupError: If anything else is done with it.
        """
        del types
        shown, *numbers = args
        if func is aten.detach.default:  # of ``gradient.data``
            return shown
        if func is aten._foreach_zero_.default:
            for each in shown:
                each.zero_()
            return None
        alike = func in _IN_PLACE | _MADE_ANEW and isinstance(shown, cls)
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "memory_format"}
        if kwargs or not alike or any(isinstance(number, torch.Tensor) and number.dim() for number in numbers):
            raise SetupError(
                "a gradient was read or changed in .grad of a module's parameter, and it stands in .grad of this "
                "rank's part, in optimizer.param_groups; clip with strategy.clip_gradients_norm, change the parts' "
                "gradients, and call strategy.backward(loss, model) instead of loss.backward()."
            )
        values = shown._part.grad if shown._made is None else shown._made
        if values is None:
            return shown
        changed = func(values, *numbers)
        return shown if func in _IN_PLACE else cls(shown._plain, shown._part, changed)

    def assigned_to(self, part: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of a part whose parameter was assigned this as its own.

        Args:
            part: The optimizer's.

        Returns:
            That; None if this was computed from another parameter's, or the part's gradient is another one by now.
        """
        return self._made if self._part is part and self._source == _state(part) else None

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # torch's is an attribute
        """Return that of the part's gradient, which may be finer than the parameter's."""
        return self._part.dtype

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no annotation
        """Describe the proxy, where printing values would be refused."""
        del tensor_contents
        return f"<gradient of shape {tuple(self.shape)}; its values stand in the parts of optimizer.param_groups>"


def _state(part: torch.Tensor) -> tuple[int, int] | None:
    """Return what tells a part's gradient from another one, and from what it becomes by a change."""
    return None if part.grad is None else (id(part.grad), part.grad._version)
