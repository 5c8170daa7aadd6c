"""Layers and parameters with hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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


class Framed(Linear):
    """A layer that comes with hooks before and after the forward of the model around it."""

    def frame(self, model: nn.Module) -> None:
        """Register the hooks."""
        model.register_forward_pre_hook(_halved_inputs)
        model.register_forward_hook(_bent_outputs)


def _halved_inputs(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ARG001 - torch's
    batch, *more = given
    return (batch._replace(inputs=0.5 * batch.inputs), *more)


def _bent_outputs(module: nn.Module, given: object, output: Any) -> Any:  # noqa: ARG001
    if isinstance(output, Mapping):
        return {name: torch.tanh(each) for name, each in output.items()}
    if isinstance(output, tuple):
        return tuple(torch.tanh(each) for each in output)
    if isinstance(output, torch.Tensor):
        return torch.tanh(output)
    output.prediction = torch.tanh(output.prediction)
    return output


HOOKS: dict[str, Callable[[], nn.Module]] = {
    "hooked": _Hooked,
    "hooked_parameter": _HookedParameter,
    "framed": Framed,
}
"""Parts with hooks, by name."""
