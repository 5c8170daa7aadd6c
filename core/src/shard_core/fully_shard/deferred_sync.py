"""Gradients that wait for a later micro-batch: what holds them must run in it, or they would stay behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shard_core._versions import version_of
from shard_core.errors import SetupError

if TYPE_CHECKING:
    from shard_core.fully_shard.units import Unit


class DeferredSync:
    """Notices units that keep gradients for a micro-batch in which they do not run.

    Torch sends what a unit has kept when its next backward sends something; a unit that is left out there sends
    nothing, and its gradient would be lost without a word.

    Args:
        units: The units of a module, without the root's.

    Attributes:
        deferred: Whether gradients are kept back just now.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.deferred = False
        self._pending: set[str] = set()
        for unit in units:
            for module in unit.modules:
                module.register_forward_pre_hook(self._note(unit.names[0]))

    def check_sent(self) -> None:
        """Make sure, after a backward, that it left nothing behind.

        Raises:
            SetupError: If a unit ran while gradients were kept back, and not since.
        """
        if not self.deferred and self._pending:
            name = min(self._pending)
            self._pending.clear()
            raise SetupError(
                f"{name!r} ran in a micro-batch whose gradients were kept back, but not in the last one, which sends "
                "them; pass defer_sync='all', or leave no_backward_sync out."
            )

    def _note(self, name: str) -> Callable[[nn.Module, Any], None]:
        def note(module: nn.Module, args: Any) -> None:
            del module, args
            if torch.is_grad_enabled():
                (self._pending.add if self.deferred else self._pending.discard)(name)

        return note


class DeferredGradients:
    """Notices who throws gradients away while they wait where torch keeps them, which is not in ``.grad``.

    There is no way to reach them. From one micro-batch to the next zeros stand in ``.grad`` in their place.

    Args:
        parameters: The shards of a module's parameters, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._zeros: dict[str, tuple[torch.Tensor, int | None]] = {}

    def show(self) -> None:
        """Let zeros stand for what a backward has kept back."""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                self._zeros[name] = parameter.grad, version_of(parameter.grad)

    def take_back(self) -> None:
        """Make room for what a backward brings.

        Raises:
            SetupError: If somebody has thrown away what waits, or changed it.
        """
        zeros, self._zeros = self._zeros, {}
        touched = []
        for name, (shown, version) in zeros.items():
            parameter = self._parameters[name]
            if parameter.grad is not shown or version_of(shown) != version:
                touched.append(name)
            else:
                parameter.grad = None
        if touched:
            raise SetupError(
                f"the gradient of {touched[0]!r} was thrown away or changed while it waits on its rank for the end of "
                "no_backward_sync(), where nothing reaches it; run the last backward of these micro-batches outside, "
                "and zero gradients then."
            )
