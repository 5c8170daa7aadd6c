"""Evaluation in torch's inference mode, where an engine keeps what a forward allocates."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def without_inference_mode() -> contextlib.ExitStack:
    """Leave inference mode, if torch is in it, for a mode without gradients; closing the result goes back."""
    contexts = contextlib.ExitStack()
    if torch.is_inference_mode_enabled():
        # Leaving inference mode turns gradients on.
        contexts.enter_context(torch.inference_mode(False))
        contexts.enter_context(torch.no_grad())
    return contexts


class NoInferenceMode:
    """Runs a module's forward without gradients, but not in inference mode, where the caller is in it.

    The memory that whole parameters are gathered into outlives the forward that first needed it; made in
    inference mode, no later forward could train with it.

    Args:
        module: What users call.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._entered: list[contextlib.ExitStack] = []
        self._handles = [
            module.register_forward_pre_hook(self._enter, prepend=True),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        del module, args
        self._entered.append(without_inference_mode())

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        if self._entered:
            self._entered.pop().close()

    def remove(self) -> None:
        """Remove the hooks: the module has its plain forward again."""
        for handle in self._handles:
            handle.remove()
