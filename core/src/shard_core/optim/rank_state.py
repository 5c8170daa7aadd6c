"""Optimizer state of one rank's shards, which no other rank may load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch.distributed.tensor import DTensor

from shard_core.errors import SetupError

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

    from shard_core.collectives.interface import Collectives

_RANK: Final = "state_of_rank"
"""The key of a state dict that says of which rank, of how many, its tensors are."""


def keep_on_rank(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, collectives: Collectives
) -> list[RemovableHandle]:
    """Have ``load_state_dict`` refuse what ``state_dict`` has returned on another rank, if ranks hold shards.

    Torch takes shards of one shape for one another, so that a file which rank 0 has saved by ``torch.save`` and all
    ranks load would give each of them rank 0's.

    Args:
        optimizer: One that was set up.
        module: The module that was set up with it.
        collectives: Of all ranks.

    Returns:
        What removes that.
    """
    whole = {id(each) for each in module.parameters() if not isinstance(each, DTensor)}
    held = [each for group in optimizer.param_groups for each in group["params"]]
    if collectives.world_size == 1 or all(id(each) in whole for each in held):
        return []
    here = (collectives.rank, collectives.world_size)

    def mark(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        del optimizer
        state_dict[_RANK] = here

    def check(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        if _RANK in state_dict and collectives.any_true(tuple(state_dict[_RANK]) != here):
            raise SetupError(
                f"{type(optimizer).__name__}.load_state_dict() was given on some rank what state_dict() has returned "
                "on another, which holds other shards; save with strategy.save_checkpoint, or save what "
                "strategy.optimizer_state_dict(optimizer) returns, which is whole."
            )

    return [optimizer.register_state_dict_post_hook(mark), optimizer.register_load_state_dict_pre_hook(check)]
