"""Compiling block by block: one graph serves all blocks of a class."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from shard_core.preparation.submodules import find_blocks

if TYPE_CHECKING:
    from torch import nn


def compile_blocks(
    module: nn.Module,
    given: bool | Mapping[str, Any],
    blocks: Sequence[nn.Module] = (),
    offloaded: Collection[nn.Module] = (),
) -> None:
    """Compile blocks in place with ``torch.compile``.

    Args:
        module: The whole module, which is compiled itself if it has no blocks.
        given: The option ``compile``: True, or arguments of ``torch.compile``.
        blocks: Which submodules are the blocks; those that repeat unless given.
        offloaded: Submodules whose activations will be offloaded. No graph can have the hooks that do so inside, so of
            these it is the forward that is compiled, not the call.
    """
    arguments: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    # Once for each function: what is compiled twice has two graphs.
    compiled = functools.cache(functools.partial(torch.compile, **arguments))
    for block in blocks or find_blocks(module) or [module]:
        forward = getattr(block.forward, "__func__", None)
        if block in offloaded and forward is not None:
            block.forward = MethodType(compiled(forward), block)
        else:
            block.compile(**arguments)
