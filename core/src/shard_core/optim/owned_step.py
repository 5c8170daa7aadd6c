"""Steps of an optimizer on the parameters that this rank owns, where every rank holds all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shard_core.errors import BrokenBackend
from shard_core.optim.kernels import inside_step

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def owned_step(optimizer: torch.optim.Optimizer, owned: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Set an optimizer to step those of its parameters that this rank owns, and to create state for no others.

    Hooks on the step see its groups whole, and so does whoever looks after it. What becomes of the parameters is the
    caller's to bring to the other ranks.

    Args:
        optimizer: The user's. Inside, call ``step`` once, without a closure: it would see some parameters only, and
            in its second evaluation those of others as they were. An engine that leaves it so does not declare CLOSURE.
        owned: Returns whether this rank steps a parameter.

    Raises:
        BrokenBackend: In ``step``, if it is given a closure all the same.

    Example:
        >>> import torch
        >>> mine, other = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
        >>> mine.grad = other.grad = torch.ones(1)
        >>> optimizer = torch.optim.SGD([mine, other], lr=0.5)
        >>> with owned_step(optimizer, lambda parameter: parameter is mine):
        ...     optimizer.step()
        >>> mine.item(), other.item(), len(optimizer.param_groups[0]["params"])
        (0.5, 1.0, 2)
    """
    whole: list[tuple[dict[str, Any], list[torch.Tensor]]] = []

    def enter(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if any(each is not None for each in (*args[1:], kwargs.get("closure"))):  # the first is the optimizer
            raise BrokenBackend(
                "owned_step() was left to a step with a closure, which would see this rank's parameters alone; step "
                "whole groups then, or leave CLOSURE out of the strategy's capabilities."
            )
        for group in optimizer.param_groups:
            whole.append((group, group["params"]))
            group["params"] = [parameter for parameter in group["params"] if owned(parameter)]

    def leave(*_: object) -> None:
        for group, parameters in whole:
            group["params"] = parameters
        whole.clear()

    with inside_step(optimizer, enter, leave):
        yield
