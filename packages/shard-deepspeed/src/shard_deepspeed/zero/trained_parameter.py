"""One trained parameter, its part, and how far its gradient has come."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch

from shard_core import SetupError
from shard_deepspeed import _versions
from shard_deepspeed.zero.gradient_proxy import GradientProxy

if TYPE_CHECKING:
    from shard_core.backend import FlatPart
    from shard_deepspeed.zero.gradient_proxy import Norm


class _Deferred(NamedTuple):
    """What stands in ``.grad`` of a part while a gradient waits whole in the module's parameter.

    Attributes:
        gradient: What earlier backwards have averaged, else zeros.
        waiting: What waits, where the part has a gradient too; None where that is all there is, and may be changed.
        changes: How often these were changed.
    """

    gradient: torch.Tensor
    waiting: torch.Tensor | None
    changes: tuple[int, ...]


@dataclasses.dataclass(kw_only=True, eq=False)
class TrainedParameter:
    """One trained parameter.

    A gradient stands in the part. The module's parameter shows that there is one, so that who throws it away there,
    by ``module.zero_grad()`` for one, throws it away.

    Attributes:
        name: The parameter's, in the module.
        parameter: The module's.
        part: What of it this rank steps; its values are the optimizer's own parameter.
        norm: Computes the norm of a gradient over all ranks.
        passed: Whether the backward that runs, or ran last, has come to it, though it may have been frozen by then.
        reached: Whether that has made a gradient for it, until the strategy has taken it.
        waits: Whether there is a gradient that is not averaged yet.
        shown: Whether the module's parameter shows a gradient, unless somebody took it away.
    """

    name: str
    parameter: torch.nn.Parameter
    part: FlatPart
    norm: Norm
    passed: bool = False
    reached: bool = False
    waits: bool = False
    shown: bool = False
    _proxy: GradientProxy | None = None
    _deferred: _Deferred | None = None

    def note(self, parameter: torch.Tensor) -> None:
        """Record a gradient, as a hook of autograd's, which also comes to what was frozen since the forward."""
        self.passed = True
        if parameter.requires_grad:
            self.reached = self.waits = True

    def fill(self) -> None:
        """Set zeros as what only other ranks have made, unless what an earlier backward has averaged stands there."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        self.reached = self.waits = True

    def check_hooks(self) -> None:
        """Check that there is no hook on the part.

        Raises:
            SetupError: If there is.
        """
        if self.part.values is not self.parameter and _versions.has_hooks(self.part.values):
            raise SetupError(
                f"what the optimizer holds of {self.name!r} has a hook on its gradient, which would not be called: "
                "gradients are put there after the backward; register it on the module's parameter."
            )

    def drop_zeros(self) -> None:
        """Remove what ``fill_frozen`` has put there and DeepSpeed has left."""
        is_frozen = self.passed and not self.waits and not self.parameter.requires_grad
        if is_frozen and self.part.values is not self.parameter:
            self.parameter.grad = None

    def show_gradient(self) -> None:
        """Set a proxy as the parameter's gradient, to show that its part has one."""
        values, parameter = self.part.values, self.parameter
        if values is parameter:
            return
        if values.grad is not None and parameter.grad is None:
            if self._proxy is None or self._proxy.shape != parameter.shape:  # at stage 3 it comes and goes
                self._proxy = GradientProxy(parameter, self.part, self.norm)
            parameter.grad = self._proxy
        self.shown = parameter.grad is not None

    def hide_gradient(self) -> None:
        """Remove the proxy, to leave room for what a backward makes."""
        if self.shown and self.parameter.grad is self._proxy:
            self.parameter.grad = None
            self.shown = False

    def remove_proxy(self) -> None:
        """Remove whichever proxy the parameter shows, for good."""
        if isinstance(self.parameter.grad, GradientProxy):
            self.parameter.grad = None
        self.shown = False

    def show_deferred(self) -> None:
        """Show in the part that a gradient waits, so that who throws that away there is noticed: it would stay."""
        values = self.part.values
        if not self.waits or values is self.parameter:
            return
        waiting = None if values.grad is None else self.parameter.grad
        if values.grad is None:
            values.grad = torch.zeros_like(values)
        self._deferred = _Deferred(values.grad, waiting, _changes(values.grad, waiting))

    @property
    def shows_deferred(self) -> bool:
        """Whether the part shows that a gradient waits, or did before somebody took it away."""
        return self._deferred is not None and self.waits

    @property
    def left(self) -> bool:
        """Whether a backward past the strategy has made a gradient, which DeepSpeed was about to send."""
        unasked = self.reached or (self.waits and self._deferred is None)
        return unasked and self.part.values is not self.parameter

    @property
    def touched(self) -> bool:
        """Whether somebody has thrown away or changed what the part showed, or a part of the gradient."""
        if self._deferred is None or not self.waits:
            return False
        gradient, waiting, changes = self._deferred
        replaced = self.part.values.grad is not gradient or (waiting is not None and self.parameter.grad is not waiting)
        return replaced or _changes(gradient, waiting) != changes

    def drop(self) -> None:
        """Throw away all of the gradient."""
        self.part.values.grad = self.parameter.grad = self._deferred = None
        self._end_proxy()
        self.reached = self.waits = self.shown = False

    def _end_proxy(self) -> None:
        """Take another proxy for the next gradient: in plain PyTorch that is another tensor."""
        if self._proxy is not None:
            self._proxy.end()
            self._proxy = None

    def hide_deferred(self) -> None:
        """Remove the zeros, to leave room for what a backward averages."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None and self.waits and deferred.waiting is None:
            self.part.values.grad = None

    @property
    def replaced(self) -> bool:
        """Whether what was computed of the gradient stands in its place in the module's parameter."""
        gradient = self.parameter.grad
        if not isinstance(gradient, GradientProxy) or gradient is self._proxy:
            return False
        return gradient.replaces(self.part.values)

    def take_replacement(self) -> None:
        """Take into the part what stands in the place of its gradient."""
        gradient = self.parameter.grad
        assert isinstance(gradient, GradientProxy)
        self._end_proxy()
        gradient.replace()
        self._proxy, self.shown = gradient, True

    def follow_gradient(self) -> None:
        """Drop the gradient if it is gone from the module's parameter, and show none that is gone from the part.

        Raises:
            SetupError: If there is another one in its place.
        """
        values, gradient = self.part.values, self.parameter.grad
        if gradient is None:
            if self.shown or values is self.parameter:
                values.grad = None
                self._end_proxy()
                self.reached = self.waits = self.shown = False
        elif gradient is self._proxy:
            if values.grad is None:
                self.hide_gradient()
                self._end_proxy()
        elif not self.waits and values is not self.parameter:
            raise SetupError(
                f"a gradient was put into .grad of {self.name!r}, and the step reads that of this rank's part of it; "
                "change gradients in optimizer.param_groups or, whole, in a hook, parameter.register_hook(change), or "
                "give backward a loss that has them."
            )


def fill_frozen(parameter: torch.Tensor) -> None:
    """Fill in, as a hook of autograd's, a gradient of zeros for what was frozen since the forward.

    Autograd makes none then and calls hooks all the same; DeepSpeed's would fail.
    """
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)


def _changes(*gradients: torch.Tensor | None) -> tuple[int, ...]:
    return tuple(gradient._version for gradient in gradients if gradient is not None)
