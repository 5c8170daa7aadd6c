"""What optimizers hold after setup."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shard_core import SetupError

if TYPE_CHECKING:
    import torch
    from torch import nn


def check_stale_parameters(strategy: str, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> None:
    """Refuse an optimizer that was given parameters as they were before setup: nothing would ever train them.

    Args:
        strategy: The strategy's name, for the message.
        optimizer: About to step.
        modules: All that were set up.

    Raises:
        SetupError: If one of its parameters has no gradient and is none of theirs.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    resting = [parameter for parameter in held if parameter.grad is None]
    if not resting:
        return
    there = {id(parameter) for module in modules for parameter in module.parameters()}
    if not all(id(parameter) in there for parameter in resting):
        raise SetupError(
            f"this {type(optimizer).__name__} holds a parameter that no gradient reaches: strategy {strategy!r} makes "
            "other parameters of a module's; give add_param_group() what parameters() gives after setup."
        )
