"""What optimizers hold after setup, and what may be loaded into a module whose parameters are shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from shard_core.errors import SetupError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shard_xla.strategy.layout import Layout


def check_held(strategy: str, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> None:
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


def refuse_whole_values(module: nn.Module, layout: Layout) -> None:
    """Let a module whose parameters are shards load shards alone.

    Args:
        module: The user's, sharded.
        layout: Where its parameters are.
    """

    def check(module: nn.Module, values: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        del module, rest
        for name, shard in layout.parameters.items():
            value = values.get(prefix + name)
            if value is not None and value.shape != shard.shape:
                raise SetupError(
                    f"parameter {name!r} is a shard of shape {tuple(shard.shape)} on this rank, and load_state_dict() "
                    f"was given a value of shape {tuple(value.shape)}; load whole values before setup, or with "
                    "strategy.load_checkpoint()."
                )

    module.register_load_state_dict_pre_hook(check)
