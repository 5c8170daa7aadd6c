"""The user's model trained in plain PyTorch, in one process, with nothing of ours."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """What is computed in which dtype.

    Attributes:
        parameter: The parameters' dtype.
        autocast: What autocast computes in, or None for no autocast.
        scaled: Whether the loss is scaled against underflow.
    """

    parameter: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scaled: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a training run went through and where it ended.

    Attributes:
        losses: The loss of each step, the mean over its parts.
        norms: The global gradient norm of each step.
        gradients: Those of the first step that was not skipped, by parameter; empty if all were skipped.
        weights: The parameters at the end.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def train(
    model: torch.nn.Module,
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
    loss_of: Callable[[Callable[..., Any], Any], torch.Tensor],
    parts: Sequence[Any],
    *,
    steps: int,
    numbers: Numbers,
) -> Run:
    """Train on the same batch for a few steps.

    Args:
        model: Where it is to be trained; it is changed.
        make_optimizer: Makes the optimizer over it.
        loss_of: Calls its first argument with the second, a batch, and returns the loss.
        parts: The batch, or the parts it is split into; the loss is the mean over them.
        steps: How often.
        numbers: The dtypes.

    Returns:
        The run, its tensors copied to the host.
    """
    model.to(numbers.parameter)
    optimizer = make_optimizer(model)
    device = next(model.parameters()).device
    scaler = torch.amp.GradScaler(device.type, enabled=numbers.scaled)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _autocast(device, numbers.autocast):
            return model(*_cast(args, numbers.parameter), **_cast(kwargs, numbers.parameter))

    run = Run(losses=[], norms=[], gradients={}, weights={})
    for _ in range(steps):
        total = 0.0
        for part in parts:
            loss = loss_of(forward, part) / len(parts)
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        gradients = {
            name: parameter.grad.detach().cpu()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        norm = norm_of(gradients.values())
        run.losses.append(total)
        run.norms.append(norm.item())
        if not run.gradients and norm.isfinite():
            run.gradients.update({name: gradient.clone() for name, gradient in gradients.items()})
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    run.weights.update({name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()})
    return run


def norm_of(tensors: Any) -> torch.Tensor:
    """Return the Euclidean norm over all tensors, computed in float64.

    Args:
        tensors: An iterable of tensors.

    Returns:
        A 0-d tensor.
    """
    sizes = [torch.linalg.vector_norm(tensor.double()) for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(sizes)) if sizes else torch.zeros((), dtype=torch.float64)


def _autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def _cast(data: Any, dtype: torch.dtype) -> Any:
    """Cast inputs along with the parameters, unless these are what they usually are."""
    if dtype == torch.float32:
        return data
    if isinstance(data, torch.Tensor):
        return data.to(dtype) if data.is_floating_point() else data
    if isinstance(data, dict):
        return {key: _cast(value, dtype) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(_cast(value, dtype) for value in data)
    return data
