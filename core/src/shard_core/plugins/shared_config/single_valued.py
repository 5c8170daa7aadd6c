"""Options that know one value: declared so that nobody's keyword is swallowed, answered in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from shard_core.errors import InvalidOption


def refuse_other_values(config: Any, reasons: Mapping[str, str]) -> None:
    """Refuse options that have another value than their default, which is the only one.

    Args:
        config: A configuration, a dataclass.
        reasons: Its options that know one value, each with the reason.

    Raises:
        InvalidOption: If one has another value.

    Example:
        >>> @dataclasses.dataclass
        ... class Config:
        ...     overlap: bool = True
        >>> refuse_other_values(Config(overlap=False), {"overlap": "messages are always sent at once"})
        Traceback (most recent call last):
        ...
        shard_core.errors.InvalidOption: overlap is False; messages are always sent at once: leave it at True.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name, reason in reasons.items():
        value, default = getattr(config, name), defaults[name]
        # Equality is asked of plain defaults alone: False equals 0, and a list of tensors does not answer.
        if value is not default and (isinstance(value, bool) != isinstance(default, bool) or value != default):
            raise InvalidOption(f"{name} is {value!r:.60}; {reason}: leave it at {default!r}.")
