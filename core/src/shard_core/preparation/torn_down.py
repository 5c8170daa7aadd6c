"""Modules whose strategy was torn down: what stays spread over ranks is neither called nor stepped."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, NoReturn

from torch.utils.weak import WeakIdKeyDictionary

from shard_core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

_CURE = (
    "do that before teardown, or save a checkpoint before it and give a module that is made anew the weights with "
    "load_checkpoint or load_weights"
)


def refuse_shards(
    strategy: str,
    module: torch.nn.Module,
    spread: Mapping[torch.nn.Module, Iterable[torch.nn.Parameter]],
    optimizers: Iterable[torch.optim.Optimizer],
) -> None:
    """Refuse, from now on, forwards and steps that would need the other ranks; nothing where ranks hold all values.

    Args:
        strategy: The strategy's name, for the messages.
        module: The user's, which the engine has let go of.
        spread: Those of its parts that hold shares of parameters, and which.
        optimizers: Those that step its parameters.
    """
    if not spread:
        return
    shards = WeakIdKeyDictionary()  # an optimizer may outlive the module, and be given another's parameters
    shards.update(dict.fromkeys(itertools.chain.from_iterable(spread.values())))
    for part in dict.fromkeys((module, *spread)):
        part.register_forward_pre_hook(functools.partial(_refuse_call, strategy), prepend=True)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(functools.partial(_check_step, strategy, shards))


def _refuse_call(strategy: str, module: torch.nn.Module, args: object) -> NoReturn:
    del module, args
    raise SetupError(
        f"a module was called after strategy {strategy!r}, which has spread its parameters over ranks, was torn down; "
        f"{_CURE}."
    )


def _check_step(strategy: str, shards: WeakIdKeyDictionary, optimizer: torch.optim.Optimizer, *_: object) -> None:
    held = (each for group in optimizer.param_groups for each in group["params"])
    if any(each.grad is not None and each in shards for each in held):  # or else it steps nothing
        raise SetupError(
            f"this {type(optimizer).__name__} holds parameters of a module whose strategy {strategy!r} was torn down, "
            f"and its step would change what this rank holds of them alone; {_CURE}."
        )
