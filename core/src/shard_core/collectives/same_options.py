"""Options that all ranks must have been given alike."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from shard_core.errors import InvalidOption

if TYPE_CHECKING:
    from shard_core.collectives.interface import Collectives


def check_same_options(strategy: str, options: Mapping[str, Any], collectives: Collectives) -> None:
    """Check that every rank was given the same strategy and options; every rank calls this.

    Where units, buckets or precisions differ, so do messages: ranks abort in them, wait until the timeout, or train
    apart without a word.

    Args:
        strategy: The strategy's name.
        options: What it was given, by name.
        collectives: Of all ranks.

    Raises:
        InvalidOption: On every rank, naming the first option that differs.
    """
    if collectives.world_size == 1:
        return
    mine = {"strategy": strategy, **{name: described(value) for name, value in options.items()}}
    everyone = collectives.gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        for name in [*everyone[0], *theirs]:
            here, there = everyone[0].get(name), theirs.get(name)
            if here != there:
                raise InvalidOption(
                    f"{name} is {there} on rank {rank} and {here} on rank 0; give every rank the same options, in "
                    "SHARD_OPTIONS of every host, too."
                )


def described(value: Any) -> str:
    """Describe an option's value so that equal ones on other ranks are described alike.

    Args:
        value: Any; of what is neither plain, nor a class, a function or made of such, the class alone is told.

    Example:
        >>> described({"layers": [int], "most": 3})
        "{'layers': [builtins.int], 'most': 3}"
    """
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, functools.partial):
        return f"partial({', '.join(map(described, (value.func, value.args, value.keywords)))})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {described(each)}" for key, each in value.items()) + "}"
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes):
        parts = map(described, value)
        return "[" + ", ".join(sorted(parts) if isinstance(value, Set) else parts) + "]"
    if dataclasses.is_dataclass(value):
        return f"{type(value).__qualname__}{described(vars(value))}"
    plain = value is None or isinstance(value, bool | int | float | str | bytes | enum.Enum | torch.dtype)
    return repr(value) if plain else f"{type(value).__module__}.{type(value).__qualname__}"
