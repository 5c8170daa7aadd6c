"""Which optimizers work element by element, so that each rank may step its own shards as if they were all."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

#: Large enough that optimizers which treat small matrices differently see a large one.
_SHAPE = (136, 144)

#: Multiples of 64, so that vectorized kernels leave no rest and give the same bits; the later begin where no
#: block of the 256 of block-wise quantization does, so that blocks are cut through. The first is small: an optimizer
#: that keeps statistics of rows takes each element of a piece for a row, and minutes for thousands of them.
_PIECES = (64, 6400, 4160, 8960)

_STEPS = 6

#: Names that optimizers and schedulers add to a group and that no constructor takes.
_BOOKKEEPING = ("params", "param_names", "initial_lr")

_AS_THEY_ARE: Mapping[str, Any] = types.MappingProxyType({})


def why_not_elementwise(
    optimizer: torch.optim.Optimizer, device: torch.device, settings: Mapping[str, Any] = _AS_THEY_ARE
) -> str | None:
    """Say why an optimizer cannot be trusted to work element by element.

    It is judged by what it does: an optimizer of the same class and settings steps a matrix whole, others step
    the same numbers cut into flat pieces, and the results must have the same bits. The optimizer itself, its
    state and the random number generators are left alone. What changes its nature after the first few
    steps is not seen.

    Args:
        optimizer: The user's.
        device: Where to try it.
        settings: What to try in the place of its groups' own settings.

    Returns:
        A clause to go on "because" with, or None if it works element by element.
    """
    kind: Any = type(optimizer)
    for group in optimizer.param_groups:
        tried = {name: value for name, value in group.items() if name not in _BOOKKEEPING} | dict(settings)
        reason = _verdict(kind, _Settings.of(optimizer.defaults), _Settings.of(tried), device)
        if reason is not None:
            return reason
    return None


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Settings of an optimizer that compare by what they say, so that verdicts can be remembered."""

    text: str
    values: Mapping[str, Any] = dataclasses.field(compare=False)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> _Settings:
        return cls(repr(sorted((name, repr(value)) for name, value in values.items())), values)


@functools.lru_cache(maxsize=64)
def _verdict(kind: Any, defaults: _Settings, group: _Settings, device: torch.device) -> str | None:
    generator = torch.Generator().manual_seed(0)
    shape = (_STEPS + 1, *_SHAPE)
    values, *gradients = torch.randn(shape, generator=generator, device="cpu").to(device).unbind()
    settings = copy.deepcopy((defaults.values, group.values))
    make = functools.partial(_make, kind, *settings)
    try:
        with _undisturbed(device):
            whole = _stepped(make, values, gradients)
    except Exception as error:  # noqa: BLE001 - whatever a stranger's optimizer raises, it cannot be tried
        return f"it could not be tried out on a matrix of its own ({type(error).__name__}: {_first_line(error)})"
    try:
        with _undisturbed(device):
            for stepped, piece, *rest in _cut(whole, values, *gradients):
                if not torch.equal(_stepped(make, piece, rest), stepped):
                    return "it steps a matrix differently from the same numbers in flat pieces"
    except Exception as error:  # noqa: BLE001
        return f"it cannot step a flat piece of a matrix ({type(error).__name__}: {_first_line(error)})"
    return None


def _cut(*matrices: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Give the same flat piece of each matrix, piece by piece."""
    return zip(*(matrix.flatten().split(_PIECES) for matrix in matrices), strict=True)


def _make(
    kind: Callable[..., torch.optim.Optimizer],
    defaults: Mapping[str, Any],
    group: Mapping[str, Any],
    parameter: torch.Tensor,
) -> torch.optim.Optimizer:
    """Build an optimizer of the user's class and settings over one parameter of ours."""
    accepted = inspect.signature(kind).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    arguments = {name: value for name, value in defaults.items() if takes_all or name in accepted}
    return kind([{**copy.deepcopy(dict(group)), "params": [parameter]}], **copy.deepcopy(arguments))


def _stepped(
    make: Callable[[torch.Tensor], torch.optim.Optimizer], start: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Step numbers and return where they ended."""
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make(parameter)
    step: Callable[..., Any] = optimizer.step
    asks = inspect.signature(step).parameters.get("closure")
    for gradient in gradients:
        evaluate = functools.partial(_evaluated, parameter, gradient)
        evaluate()
        # Given only where it must be: it would undo what a step does to gradients before it asks.
        step(*([evaluate] if asks is not None and asks.default is inspect.Parameter.empty else []))
    return parameter.detach()


def _evaluated(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Be the closure of a loss."""
    parameter.grad = gradient.clone()
    return gradient.new_ones(())


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Give every generator its state back afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0].rstrip(".")
