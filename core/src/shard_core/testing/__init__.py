"""What strategies are tested with: the conformance kit, worlds of real ranks, an oracle in plain PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shard_core.testing import bits, models, oracle
    from shard_core.testing.conformance import Conformance
    from shard_core.testing.processes.script import Outcome, run_python
    from shard_core.testing.processes.world import World
    from shard_core.testing.rules import Promise, promise, promise_of, promises_of
    from shard_core.testing.training import set_up, step, train_under, whole_weights

__all__ = [
    "Conformance",
    "Outcome",
    "Promise",
    "World",
    "bits",
    "models",
    "oracle",
    "promise",
    "promise_of",
    "promises_of",
    "run_python",
    "set_up",
    "step",
    "train_under",
    "whole_weights",
]

#: The names of each module; a module that is a name itself has none.
_HOMES = {
    "bits": (),
    "models": (),
    "oracle": (),
    "conformance": ("Conformance",),
    "processes.script": ("Outcome", "run_python"),
    "processes.world": ("World",),
    "rules": ("Promise", "promise", "promise_of", "promises_of"),
    "training": ("set_up", "step", "train_under", "whole_weights"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name == module or name in names:
            found = importlib.import_module(f"{__name__}.{module}")
            return getattr(found, name) if name in names else found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
