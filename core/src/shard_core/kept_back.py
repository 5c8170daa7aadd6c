"""Gradients that wait for a later micro-batch: what holds them must run in it, or they would stay behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shard_core.errors import SetupError

if TYPE_CHECKING:
    from shard_core.units import Unit


class KeptBack:
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
        self._keeping: set[str] = set()
        for unit in units:
            for module in unit.modules:
                module.register_forward_pre_hook(self._note(unit.names[0]))

    def check_sent(self) -> None:
        """Make sure, after a backward, that it left nothing behind.

        Raises:
            SetupError: If a unit ran while gradients were kept back, and not since.
        """
        if not self.deferred and self._keeping:
            name = min(self._keeping)
            self._keeping.clear()
            raise SetupError(
                f"{name!r} ran in a micro-batch whose gradients were kept back, but not in the last one, which sends "
                "them; pass defer_sync='all', or leave no_backward_sync out."
            )

    def _note(self, name: str) -> Callable[[nn.Module, Any], None]:
        def note(module: nn.Module, args: Any) -> None:
            del module, args
            if torch.is_grad_enabled():
                (self._keeping.add if self.deferred else self._keeping.discard)(name)

        return note
