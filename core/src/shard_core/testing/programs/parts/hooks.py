"""Layers and parameters with hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from shard_core.testing.programs.parts.part import Linear

if TYPE_CHECKING:
    from collections.abc import Callable

_Gradients = tuple[torch.Tensor, ...] | torch.Tensor


class _Hooked(Linear):
    """A layer with hooks before and after its forward, and a hook of the gradients that flow back through it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_pre_hook(_scaled_input)
        self.layer.register_forward_hook(_scaled_output)
        self.layer.register_full_backward_hook(_scaled_gradient)


def _scaled_input(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:  # noqa: ARG001 - torch's
    return (inputs[0] * 1.5,)


def _scaled_output(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return output * 0.75


def _scaled_gradient(module: nn.Module, given: _Gradients, received: _Gradients) -> _Gradients:  # noqa: ARG001
    return given if given[0] is None else (0.5 * given[0],)  # the batch itself needs no gradient


class _HookedParameter(Linear):
    """A layer whose weight has a hook on its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_hook(_halved)


def _halved(gradient: torch.Tensor) -> torch.Tensor:
    return 0.5 * gradient


HOOKS: dict[str, Callable[[], nn.Module]] = {
    "hooked": _Hooked,
    "hooked_parameter": _HookedParameter,
}
"""Parts with hooks, by name."""
