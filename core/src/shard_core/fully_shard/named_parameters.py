"""Shards are what ``parameters()`` lists: between a forward and its backward torch would show gathered copies."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shard_core.fully_shard.entry_methods import reshard


def list_shards(module: torch.nn.Module, running: Callable[[], bool]) -> None:
    """Have ``parameters()`` and what is built on it, such as ``zero_grad``, reach the shards at any time.

    After a forward the root keeps its parameters gathered for the backward. What is listed then, to be zeroed or
    changed by hand, would be copies that are freed after it, and the change would be lost. A gathered unit is freed
    first; its backward gathers it again.

    Args:
        module: One that was sharded.
        running: Returns whether a forward or a backward runs, which needs what is gathered.
    """

    @functools.wraps(torch.nn.Module.named_parameters)
    def named_parameters(part: torch.nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        if not torch.compiler.is_compiling() and not running():
            reshard(module)
        return type(part).named_parameters(part, *args, **kwargs)

    for part in module.modules():
        # A bound method, as torch's compiler expects of those that users have replaced.
        vars(part)[named_parameters.__name__] = types.MethodType(named_parameters, part)
