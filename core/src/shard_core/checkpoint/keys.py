"""The grammar of checkpoint keys: how the names of stored tensors are composed, and parsed.

``model.NAME`` is a parameter or a buffer, ``optim.NAME.SLOT`` a tensor of the state an optimizer keeps of a parameter,
``state.PATH`` a tensor among the user's values. In a checkpoint of several modules each NAME begins with its module's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What a key begins with, up to its first dot; files are named after it too.
KINDS = ("model", "optim", "state")
MODEL, OPTIMIZER, VALUE = (f"{kind}." for kind in KINDS)

#: What the user's keys may not begin with: under it a strategy keeps state of its own beside the user's.
OWN_KEYS = "shard_"

#: Where the random number generators of all ranks stood. It is how a run stands, not what it has learned.
RANDOM_KEY = f"{OWN_KEYS}random"

#: The keys of the parameters that a save has left out because they are frozen.
FROZEN_KEY = f"{OWN_KEYS}frozen"

#: What the keys of the generators' tensors begin with.
RANDOM_TENSORS = f"{VALUE}{RANDOM_KEY}."


def frozen_keys(values: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys of the parameters that a save has left out because they are frozen.

    Args:
        values: Those of the checkpoint, which nobody has believed yet.

    Example:
        >>> sorted(frozen_keys({"step": 3, FROZEN_KEY: ["model.base.weight"]}))
        ['model.base.weight']
    """
    found = values.get(FROZEN_KEY)
    return frozenset(map(str, found if isinstance(found, list) else ()))


def model_key(name: str) -> str:
    """Return the key of a parameter or a buffer.

    Example:
        >>> model_key("head.weight"), name_in(model_key("head.weight"))
        ('model.head.weight', 'head.weight')
    """
    return f"{MODEL}{name}"


def name_in(key: str) -> str:
    """Return the name of the parameter or buffer in its key."""
    return key.removeprefix(MODEL)


def slot_key(name: str, slot: str) -> str:
    """Return the key of a tensor of optimizer state.

    Example:
        >>> slot_key("head.weight", "exp_avg"), slot_in(slot_key("head.weight", "exp_avg"))
        ('optim.head.weight.exp_avg', ('head.weight', 'exp_avg'))
    """
    return f"{OPTIMIZER}{name}.{slot}"


def slot_in(key: str, prefix: str = OPTIMIZER) -> tuple[str, str]:
    """Return the parameter's name and the slot in the key of a tensor of optimizer state.

    Args:
        key: The key.
        prefix: What is left out of the name besides ``optim.``; it begins with that.
    """
    name, _, slot = key.removeprefix(prefix).rpartition(".")
    return name, slot


def is_slot(key: str) -> bool:
    """Return whether a key is that of a tensor of optimizer state."""
    return key.startswith(OPTIMIZER)
