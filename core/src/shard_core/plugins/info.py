"""What a backend says about a strategy before anything of it is imported."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shard_core.capability import Capability
    from shard_core.options import Option
    from shard_core.precision.interface import PrecisionPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyInfo:
    """The visiting card of a strategy: pure data, readable without torch.

    Attributes:
        name: The word users type.
        summary: One line about what it does.
        factory: Where the class is, as ``"package.module:Class"``; imported only to build it.
        capabilities: The optional promises it makes.
        precisions: The precision names it honours, in the order people should consider them.
        devices: The device types it runs on.
        options: Its own keyword arguments, beyond those every strategy takes.
        max_ranks: How many ranks it runs on at most; None for any number.
        beyond_max_ranks: What whoever asks for more ranks can do, the end of the sentence that refuses them.
        presets: Option values that this name stands for, e.g. ``{"stage": 2}``. Another plain value is refused; an
            object or a tuple that says more may replace one.
        policies: Tables of its own for some of its precisions, by name, where the engine keeps other dtypes
            than core's table says.
        refused: Keywords that people know from the engine and that it does not take here, each with what to do
            instead, to follow a colon and be followed by a full stop.
        known_as: Names that people know it by from elsewhere, each with what to write here, as in ``refused``.
    """

    name: str
    summary: str
    factory: str
    capabilities: frozenset[Capability] = frozenset()
    precisions: tuple[str, ...] = ("32-true",)
    devices: tuple[str, ...] = ("cpu",)
    options: tuple[Option, ...] = ()
    max_ranks: int | None = None
    beyond_max_ranks: str = "`shard list` shows strategies for more"
    presets: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    policies: Mapping[str, PrecisionPolicy] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    known_as: Mapping[str, str] = dataclasses.field(default_factory=dict)
