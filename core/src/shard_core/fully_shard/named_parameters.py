"""Shards are what ``parameters()`` lists: between a forward and its backward torch would show gathered copies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shard_core.fully_shard.entry_methods import reshard

METHOD = "named_parameters"


def list_shards(module: torch.nn.Module, running: Callable[[], bool]) -> None:
    """Have ``parameters()`` and what is built on it, such as ``zero_grad``, reach the shards at any time.

    After a forward the root keeps its parameters gathered for the backward. What is listed then, to be zeroed or
    changed by hand, would be copies that are freed after it, and the change would be lost. A gathered unit is freed
    first; its backward gathers it again.

    Args:
        module: One that was sharded.
        running: Returns whether a forward or a backward runs, which needs what is gathered.
    """
    for part in module.modules():
        vars(part)[METHOD] = _NamedParameters(part, module, running)


class _NamedParameters:
    """What a part of a sharded module has in place of ``named_parameters``; a copy has its class's again."""

    def __init__(self, part: torch.nn.Module, module: torch.nn.Module, running: Callable[[], bool]) -> None:
        self._part = part
        self._module = module
        self._running = running
        functools.update_wrapper(self, getattr(part, METHOD))

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """List the parameters as the class's method would."""
        if not torch.compiler.is_compiling() and not self._running():
            reshard(self._module)
        return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined,no-any-return]  # from update_wrapper

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes, in a copy, the method of the copy's class."""
        return getattr, (self._part, METHOD)
