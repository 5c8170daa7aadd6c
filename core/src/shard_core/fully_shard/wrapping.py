"""Wrapping by hand: torch's ``wrap`` marks a submodule, and setup makes it a unit."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp.wrap import enable_wrap

from shard_core.errors import InvalidOption
from shard_core.preparation.submodules import has_forward

if TYPE_CHECKING:
    from torch import nn


class ManualUnits:
    """The submodules that users have wrapped.

    They are marked and not sharded at once: before setup nobody knows with what they share parameters, which
    optimizers hold them, or what their values will be.
    """

    def __init__(self) -> None:
        self._marked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._enabled = False

    @contextlib.contextmanager
    def enabled(self) -> Iterator[None]:
        """Make ``torch.distributed.fsdp.wrap.wrap`` mark what it is given; torch refuses a context in a context."""
        if self._enabled:
            yield
            return
        self._enabled = True
        try:
            with enable_wrap(wrapper_cls=self._mark):
                yield
        finally:
            self._enabled = False

    def of(self, module: nn.Module) -> list[nn.Module]:
        """List the marked submodules of a module.

        Args:
            module: The whole module.
        """
        return [part for part in module.modules() if part in self._marked]

    def _mark(self, module: nn.Module, **overrides: Any) -> nn.Module:
        kind = type(module).__name__
        if overrides:
            raise InvalidOption(
                f"wrap() gives {kind} {', '.join(map(repr, sorted(overrides)))} of its own; options hold for all units "
                "alike, so give them to get_strategy()."
            )
        if not has_forward(type(module)):
            raise InvalidOption(f"wrap() was given a {kind}, which has no forward; wrap what it holds.")
        self._marked.add(module)
        return module
