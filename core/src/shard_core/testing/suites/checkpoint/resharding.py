"""A checkpoint goes on at another number of ranks and under another strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from shard_core.testing.bits import Assorted, Bits, assert_same_bits, bits_of, trained
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.training import set_up

if TYPE_CHECKING:
    from pathlib import Path

    from shard_core.testing.strategy_under_test import Ranks, Subject

_BELOW = ("ties_come_back_tied", "moments_come_back", "frozen_parameters_stay_frozen")


class Resharding(Suite):
    """A checkpoint goes on at another number of ranks and under another strategy."""

    @promise(after=_BELOW)
    def test_loads_at_another_world_size(self, ranks: Ranks, ranks_of: Callable[..., Ranks], tmp_path: Path) -> None:
        """What one number of ranks saved, weights and optimizer state, loads at any other, bit for bit.

        Usual cause:
            Files or keys are looked for by rank, or an uneven last shard is truncated or padded.
        """
        saved = ranks.run(saves, tmp_path)[0]
        others = [size for size in self.sizes() if size != ranks.size]
        for size in others or {1} - {ranks.size}:
            _judge(f"saved at {ranks.size} ranks and loaded at {size}", ranks_of(size), tmp_path, saved)

    @promise(after=_BELOW)
    @pytest.mark.parametrize("other", ["single", "ddp"])
    def test_loads_under_other_strategies(
        self, ranks: Ranks, ranks_of: Callable[..., Ranks], tmp_path: Path, other: str
    ) -> None:
        """What this strategy saved, weights and optimizer state, loads under any other, bit for bit.

        Usual cause:
            Names or shapes of the engine, a flat buffer say, get into the checkpoint instead of the user's.
        """
        saved = ranks.run(saves, tmp_path)[0]
        _judge(f"loaded by {other!r}", ranks_of(_size(other, ranks), other), tmp_path, saved)

    @promise(after=(*_BELOW, "loads_at_another_world_size", "loads_under_other_strategies"))
    @pytest.mark.parametrize("other", ["single", "ddp"])
    def test_loads_what_other_strategies_saved(
        self, ranks: Ranks, ranks_of: Callable[..., Ranks], tmp_path: Path, other: str
    ) -> None:
        """What any strategy saved, weights and optimizer state, loads under this one, bit for bit.

        Usual cause:
            A load relies on something that only this strategy writes.
        """
        saved = ranks_of(_size(other, ranks), other).run(saves, tmp_path)[0]
        _judge(f"saved by {other!r}", ranks, tmp_path, saved)


def _size(other: str, ranks: Ranks) -> int:
    """Choose how many ranks the other strategy has."""
    return 1 if other == "single" else ranks.size


def _judge(where: str, ranks: Ranks, path: Path, saved: Bits) -> None:
    assert_same_bits(where, ranks.run(loads, path)[0], saved)


def saves(subject: Subject, path: Path) -> Bits:
    """Train and save a model; return all its bits."""
    with subject.strategy() as strategy:
        model, optimizer = trained(strategy)
        strategy.save_checkpoint(path, {"model": model, "optimizer": optimizer})
        return bits_of(strategy, model, optimizer)


def loads(subject: Subject, path: Path) -> Bits:
    """Load a model into a fresh one; return all its bits."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, Assorted, "adamw", seed=1)
        strategy.load_checkpoint(path, {"model": model, "optimizer": optimizer})
        return bits_of(strategy, model, optimizer)
