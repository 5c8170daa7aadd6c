"""Deferred gradients wait for a later micro-batch: their units must run in it, or they would be lost."""

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
    """Notices units with deferred gradients that do not run in the micro-batch that reduces them.

    Torch sends what a unit has deferred when its next backward sends something; a unit that is left out there sends
    nothing, and its gradient would be lost without a word.

    Args:
        units: The units of a module, without the root's.

    Attributes:
        deferred: Whether the reduction of gradients is deferred just now.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.deferred = False
        self._pending: set[str] = set()
        for unit in units:
            for module in unit.modules:
                module.register_forward_pre_hook(self._note(unit.names[0]))

    def check_sent(self) -> None:
        """Check, after a backward, that no deferred gradient was left out.

        Raises:
            SetupError: If a unit ran while gradients were deferred, and not since.
        """
        if not self.deferred and self._pending:
            name = min(self._pending)
            self._pending.clear()
            raise SetupError(
                f"{name!r} ran in a micro-batch whose gradients were deferred, but not in the last one, which sends "
                "them; pass defer_sync='all', or leave no_backward_sync out."
            )

    def _note(self, name: str) -> Callable[[nn.Module, Any], None]:
        def note(module: nn.Module, args: Any) -> None:
            del module, args
            if torch.is_grad_enabled():
                (self._pending.add if self.deferred else self._pending.discard)(name)

        return note


class DeferredGradients:
    """Notices who discards deferred gradients, which wait where torch keeps them and not in ``.grad``.

    There is no way to reach them. From one micro-batch to the next zeros stand in ``.grad`` in their place.

    Args:
        parameters: The shards of a module's parameters, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._zeros: dict[str, tuple[torch.Tensor, int | None]] = {}

    def set_zeros(self) -> None:
        """Set ``.grad`` to zeros where a backward has deferred the gradients."""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                self._zeros[name] = parameter.grad, version_of(parameter.grad)

    def remove_zeros(self) -> None:
        """Remove the zeros before a backward adds gradients.

        Raises:
            SetupError: If somebody has discarded or changed what waits.
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
