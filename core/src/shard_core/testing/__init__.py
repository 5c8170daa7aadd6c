"""What strategies are tested with: the conformance kit, worlds of real ranks, an oracle in plain PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shard_core.testing.conformance import Conformance
    from shard_core.testing.processes.world import World

__all__ = ["Conformance", "World"]

_HOMES = {"Conformance": "shard_core.testing.conformance", "World": "shard_core.testing.processes.world"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
