"""One contract for distributed PyTorch training; the public names, each imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shard_core.capability import Capability
    from shard_core.data import ShardedLoader
    from shard_core.ema import ExponentialMovingAverage
    from shard_core.errors import (
        AmbiguousStrategy,
        BrokenBackend,
        CannotReplay,
        CheckpointCorrupted,
        CheckpointError,
        CheckpointMismatch,
        CheckpointNotFound,
        CheckpointOvertaken,
        CollectiveError,
        IncompatibleBackend,
        InvalidOption,
        LaunchError,
        MissingCapability,
        MissingRank,
        NonFiniteGradient,
        PrecisionMismatch,
        RankFailed,
        SetupError,
        ShardError,
        StorageError,
        StrategyUnavailable,
        UnknownStrategy,
        UnsupportedFloat16,
        UnsupportedPrecision,
    )
    from shard_core.options import Option
    from shard_core.plugins.info import StrategyInfo
    from shard_core.precision.interface import PrecisionPolicy
    from shard_core.run_options import RunOptions
    from shard_core.selection import get_strategy
    from shard_core.strategy import Strategy

    __version__: str

__all__ = [
    "AmbiguousStrategy",
    "BrokenBackend",
    "CannotReplay",
    "Capability",
    "CheckpointCorrupted",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointOvertaken",
    "CollectiveError",
    "ExponentialMovingAverage",
    "IncompatibleBackend",
    "InvalidOption",
    "LaunchError",
    "MissingCapability",
    "MissingRank",
    "NonFiniteGradient",
    "Option",
    "PrecisionMismatch",
    "PrecisionPolicy",
    "RankFailed",
    "RunOptions",
    "SetupError",
    "ShardError",
    "ShardedLoader",
    "StorageError",
    "Strategy",
    "StrategyInfo",
    "StrategyUnavailable",
    "UnknownStrategy",
    "UnsupportedFloat16",
    "UnsupportedPrecision",
    "__version__",
    "get_strategy",
]

#: The module of each public name that is no error; errors live together.
_HOMES = {
    "Capability": "shard_core.capability",
    "ExponentialMovingAverage": "shard_core.ema",
    "Option": "shard_core.options",
    "PrecisionPolicy": "shard_core.precision.interface",
    "RunOptions": "shard_core.run_options",
    "ShardedLoader": "shard_core.data",
    "Strategy": "shard_core.strategy",
    "StrategyInfo": "shard_core.plugins.info",
    "get_strategy": "shard_core.selection",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("shard-core")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "shard_core.errors")), name)


def __dir__() -> list[str]:
    return __all__
