"""Full tensors that ``load_state_dict`` of a sharded module is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shard_core.fully_shard.entry_methods import reshard
from shard_core.parameters import laid_out_like, plain_name

if TYPE_CHECKING:
    import weakref

    import torch


def shard_full_tensors(
    root: weakref.ref[torch.nn.Module],
    module: torch.nn.Module,
    state_dict: dict[str, torch.Tensor],
    prefix: str,
    metadata: dict[str, Any],
    *others: object,
) -> None:
    """Shard full tensors that ``load_state_dict`` is given, which torch would not mix with shards.

    With ``assign=True`` they are copied, too: what is assigned in a shard's place, the unit would never see.
    """
    del others
    metadata.pop("assign_to_params_buffers", None)
    whole = root()
    if whole is not None:
        reshard(whole)
    for name, parameter in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        key = plain_name(name)
        if key in state_dict:
            state_dict[key] = laid_out_like(parameter, state_dict[key])
