"""Which modules a loss reaches: where several are set up, it may be more than the one that its backward names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from shard_core._versions import gathered_for
from shard_core.gradients import graph_nodes

if TYPE_CHECKING:
    from torch import nn


def reached_by(loss: torch.Tensor, modules: Sequence[nn.Module]) -> list[bool]:
    """Return of each module whether a backward of a loss would give a gradient to any of its parameters.

    The search ends once all are found. What a custom ``autograd.Function`` hides, such as activation checkpointing with
    ``use_reentrant=True``, it does not see; a module is found by any other of its parameters.

    Args:
        loss: Any tensor with a graph.
        modules: The modules.

    Returns:
        As many answers, for this rank's loss.
    """
    owners: dict[torch.Tensor, list[int]] = {}
    for number, module in enumerate(modules):
        for leaf in _leaves(module):
            owners.setdefault(leaf, []).append(number)
    missing = set(range(len(modules)))
    for node in graph_nodes(loss):
        if not missing:
            break
        end = getattr(node, "variable", None)  # functions of users' own may have one, too
        if isinstance(end, torch.Tensor):
            missing.difference_update(owners.get(end, ()))
    return [number not in missing for number in range(len(modules))]


def _leaves(module: nn.Module) -> Iterator[torch.Tensor]:
    """Iterate over the tensors at which graphs end that reach a module's parameters."""
    for part in module.modules():
        # The class's own: what a part lists by itself may be what optimizers step, and free what computes for it.
        for name, parameter in torch.nn.Module.named_parameters(part, recurse=False):
            yield parameter
            # What computes may stand before what optimizers step, under the same name.
            full = vars(part).get(name)
            if isinstance(full, torch.Tensor):
                yield full
        yield from gathered_for(part)
