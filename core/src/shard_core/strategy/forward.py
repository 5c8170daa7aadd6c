"""Running a module's forwards in its precision's context."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

    from shard_core.precision.interface import Precision


class ForwardPrecision:
    """Casts the inputs of a module's forward and enters the precision's context around it.

    It hooks into the module instead of wrapping it, so that names stay the user's own.

    Args:
        module: The module users call.
        precision: The part that says what to do.
        device_type: Where the module runs.
    """

    def __init__(self, module: torch.nn.Module, precision: Precision, device_type: str) -> None:
        self._precision = precision
        self._device_type = device_type
        self._entered: list[contextlib.AbstractContextManager[Any]] = []
        self._handles: list[RemovableHandle] = []
        if not precision.plain_forward:
            self._handles = [
                module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def _enter(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        del module
        context = self._precision.forward_context(self._device_type)
        context.__enter__()
        self._entered.append(context)
        return self._precision.convert_input(args), self._precision.convert_input(kwargs)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        if self._entered:
            self._entered.pop().__exit__(None, None, None)

    def remove(self) -> None:
        """Give the module its plain forward back."""
        for handle in self._handles:
            handle.remove()
