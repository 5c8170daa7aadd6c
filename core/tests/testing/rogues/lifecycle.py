"""Mistakes made while a strategy starts."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from rogues.rogue import Rogue
from shard_core.errors import UnsupportedPrecision

if TYPE_CHECKING:
    from shard_core.plugins import StrategyInfo


class Honest(Rogue):
    """Makes no mistake."""


class TellsLess(Rogue):
    """Can do more than it says."""

    def __init__(self, *, info: StrategyInfo, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.info = info


class StartsAtOnce(Rogue):
    """Joins the ranks when it is built."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.inner.setup_environment()


class ShunsAPrecision(Rogue):
    """Refuses a precision that it declares."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if arguments.get("precision") == "bf16-true":
            raise UnsupportedPrecision("bf16-true is not honoured.")


class LacksAMember(Rogue):
    """Has no ``module_sharded_context``."""

    def __getattr__(self, name: str) -> Any:
        if name == "module_sharded_context":
            raise AttributeError(name)
        return super().__getattr__(name)


class SeedsAnew(Rogue):
    """Draws other weights each time."""

    def seed_everything(self, seed: int) -> None:
        self.inner.seed_everything(random.SystemRandom().randrange(2**32))


class MasksAlike(Rogue):
    """Leaves all data ranks with the same random numbers."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        ready = self.inner.setup_module_and_optimizers(module, optimizers)
        torch.manual_seed(1)
        return ready


class ReseedsAlike(Rogue):
    """Gives all data ranks the same random numbers when it is seeded in mid-run."""

    def seed_everything(self, seed: int) -> None:
        self.inner.seed_everything(seed)
        torch.manual_seed(seed)


class RunsAnew(Rogue):
    """Draws other masks each time."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        ready = self.inner.setup_module_and_optimizers(module, optimizers)
        torch.seed()
        return ready


class HoldsOn(Rogue):
    """Keeps what it has set up."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        _held.append(module)
        return self.inner.setup_module_and_optimizers(module, optimizers)


_held: list[Any] = []
