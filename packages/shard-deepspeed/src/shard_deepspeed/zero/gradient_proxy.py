"""What a module's parameter shows as its gradient while the gradient stands in parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from shard_core import SetupError

if TYPE_CHECKING:
    from shard_core.backend import FlatPart

aten = torch.ops.aten
_ELEMENTWISE = {
    *(aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.neg_.default, aten.sign_.default),
    *(aten.mul_.Tensor, aten.div_.Tensor, aten.add_.Tensor, aten.sub_.Tensor),
    *(aten.clamp_.default, aten.clamp_min_.default, aten.clamp_max_.default, aten.nan_to_num_.default),
}
"""What changes each element by itself, and by numbers that are the same for all."""

_COPYING = {
    *(aten.clone.default, aten.neg.default, aten.sign.default, aten.nan_to_num.default),
    *(aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor),
    *(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default),
}
"""What makes another gradient of each element by itself."""

_FOREACH: dict[Any, Callable[..., torch.Tensor]] = {
    aten._foreach_zero_.default: torch.Tensor.zero_,
    aten._foreach_mul_.Tensor: torch.Tensor.mul_,
    aten._foreach_mul_.Scalar: torch.Tensor.mul_,
    aten._foreach_clamp_min_.Scalar: torch.Tensor.clamp_min_,
    aten._foreach_clamp_max_.Scalar: torch.Tensor.clamp_max_,
}
"""What changes many tensors at once, and the same for one."""

_OF_SHAPES = {
    *(torch.linalg.norm, torch.linalg.matrix_norm),
    *(torch.Tensor.__getitem__, torch.Tensor.__setitem__),
}
"""What torch reads a tensor's shape for before it dispatches: norms of matrices, and indices."""

Norm: TypeAlias = Callable[[torch.Tensor, float], torch.Tensor]
"""Computes the norm over all ranks of a gradient of which each holds a part, given that and which norm."""


class GradientProxy(torch.Tensor):
    """A gradient's shape without its values: thrown away or changed alike everywhere, it is the part's; else refused.

    Without it ``p.grad`` of a module's parameter would be None between a backward and a step, and loops over gradients,
    and ``module.zero_grad()``, would do nothing and say nothing. Its norm is that of the whole gradient, for which
    every rank must ask: torch clips by it. What is computed of it alike everywhere is another, with values of its own,
    which may be put in its place.

    Args:
        parameter: The module's.
        part: What of it the optimizer steps, whose gradient is meant.
        norm: Computes the norm over all ranks.
    """

    _part: torch.Tensor
    _numel: int
    _norm_of: Norm
    _over: bool
    _scalar: torch.Tensor
    _own: torch.Tensor | None
    _origin: tuple[torch.Tensor, int] | None

    @staticmethod
    def __new__(cls: type[GradientProxy], parameter: torch.Tensor, part: FlatPart, norm: Norm) -> GradientProxy:
        """Allocate one element's memory, whatever the shape."""
        return cls._made(parameter.detach().new_zeros(()), parameter.shape, part.values, math.prod(part.shape), norm)

    @classmethod
    def _made(
        cls, scalar: torch.Tensor, shape: torch.Size, part: torch.Tensor, numel: int, norm: Norm
    ) -> GradientProxy:
        made = scalar.expand(shape).as_subclass(cls)
        made._scalar, made._part, made._numel, made._norm_of, made._over = scalar, part, numel, norm, False
        made._own = made._origin = None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse what would depend on the shape, which a proxy has not at stage 3.

        Norms of matrices would be those of vectors there, and indices out of bounds.

        Raises:
            SetupError: If such a norm, or an element, is asked for.
        """
        del types
        if func in _OF_SHAPES:
            raise _refusal()
        # As that of plain tensors, which makes no proxy of what comes out.
        return torch.Tensor.__torch_function__(func, (torch.Tensor,), args, kwargs)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is a stand-in that disables it
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply to the part's gradient what is the same element by element, by one number for all; compute its norm.

        Raises:
            SetupError: If anything else is done with it.
        """
        del types
        shown, *numbers = args
        if func is aten.detach.default:  # of ``gradient.data``
            return shown
        if func in _FOREACH:
            for each in shown:
                _FOREACH[func](each, *numbers)
            return None
        if func is aten._foreach_norm.Scalar and not kwargs:
            return [torch.linalg.vector_norm(each, *numbers) for each in shown]
        if func is aten.linalg_vector_norm.default and not kwargs:
            return shown._whole_norm(*numbers)
        alike = func in _ELEMENTWISE | _COPYING and isinstance(shown, cls) and not shown._over
        if kwargs or not alike or any(isinstance(number, torch.Tensor) and number.dim() for number in numbers):
            raise _refusal()
        values = shown._current
        if func in _COPYING:
            return shown._copied(func(values, *numbers)) if values is not None else shown
        if values is not None:
            func(values, *numbers)
        return shown

    @property
    def _current(self) -> torch.Tensor | None:
        return self._part.grad if self._own is None else self._own

    def _copied(self, values: torch.Tensor) -> GradientProxy:
        made = self._made(self._scalar, self.shape, self._part, self._numel, self._norm_of)
        gradient = self._part.grad
        made._own = values
        made._origin = self._origin or (None if gradient is None else (gradient, gradient._version))
        return made

    def replaces(self, part: torch.Tensor) -> bool:
        """Return whether it was computed of a part's gradient, which is still what it was."""
        gradient, origin = self._part.grad, self._origin
        return part is self._part and origin is not None and origin[0] is gradient and origin[1] == gradient._version

    def replace(self) -> None:
        """Write its values to the gradient of which it was computed, to which DeepSpeed adds what comes next."""
        assert self._part.grad is not None
        assert self._own is not None
        self._part.grad.copy_(self._own)
        self._own = self._origin = None

    def _whole_norm(self, norm_type: float = 2.0, *along: object) -> torch.Tensor:
        gradient = self._current
        if gradient is None or self._over or norm_type <= 0 or any(along):
            raise _refusal()
        return self._norm_of(gradient, norm_type)

    def numel(self) -> int:
        """Return how many elements the gradient has, of which at stage 3 there are none here."""
        return self._numel

    def end(self) -> None:
        """Refuse from now on what is done to it, where somebody keeps it: its gradient was thrown away."""
        self._over = True

    @property
    def data(self) -> torch.Tensor:
        """Return the proxy; other data cannot be put in its place."""
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        del value
        raise _refusal()

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # torch's is an attribute
        """Return that of the part's gradient, which may be finer than the parameter's."""
        return self._part.dtype

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no annotation
        """Describe the proxy, where printing values would be refused."""
        del tensor_contents
        return f"<gradient of shape {tuple(self.shape)}; its values stand in the parts of optimizer.param_groups>"


def _refusal() -> SetupError:
    return SetupError(
        "elements of a gradient were read or changed in .grad of a module's parameter, and they stand in parts on all "
        "ranks, here in optimizer.param_groups; change some of them in a hook, parameter.register_hook(change), which "
        "has its rank's whole gradient before it is averaged, read them with strategy.module_gradients(model), clip "
        "with strategy.clip_gradients_norm, and call strategy.backward(loss, model) instead of loss.backward()."
    )
