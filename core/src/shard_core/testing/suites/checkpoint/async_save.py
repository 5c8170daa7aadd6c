"""An async save holds what there was at its call, and its failure is raised."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shard_core.errors import CheckpointError
from shard_core.testing.bits import Bits, assert_same_bits, bits_of, samples, trained
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.training import step

if TYPE_CHECKING:
    from pathlib import Path

    from shard_core.testing.strategy_under_test import Ranks, Subject

_STEPS = 4


class AsyncSave(Suite):
    """An async save holds what there was at its call, and its failure is raised."""

    @promise(after=("round_trip_is_bitwise", "moments_come_back"))
    def test_background_save_is_of_its_moment(self, ranks: Ranks, tmp_path: Path) -> None:
        """With ``blocking=False`` a checkpoint holds what was there at the call, bit for bit, though training goes on.

        Usual cause:
            The engine changes what it declared only an optimizer's step would change, or tensors are copied too late.
        """
        for rank, (moment, saved) in enumerate(ranks.run(saves_and_goes_on, tmp_path / "run")):
            assert_same_bits(f"after a load on rank {rank} of what was saved asynchronously", saved, moment)

    @promise(after=("background_save_is_of_its_moment",))
    def test_failed_background_save_is_raised(self, ranks: Ranks, tmp_path: Path) -> None:
        """An async save that fails raises on every rank at the next step of an optimizer.

        Usual cause:
            The thread's exception stays in the thread, or is raised on the rank alone whose disk was at fault.
        """
        (tmp_path / "file").touch()
        for rank, message in enumerate(ranks.run(steps_after_a_failure, tmp_path / "file" / "run")):
            assert message, f"an async save below a file failed, and the next step on rank {rank} raised nothing"


def saves_and_goes_on(subject: Subject, path: Path) -> tuple[Bits, Bits]:
    """Save asynchronously while training goes on, and load that; return all bits at the save and after the load."""
    with subject.strategy() as strategy:
        model, optimizer = trained(strategy)
        state = {"model": model, "optimizer": optimizer}
        moment = bits_of(strategy, model, optimizer)
        handle = strategy.save_checkpoint(path, state, blocking=False)
        for batch in samples(_STEPS):
            step(strategy, model, optimizer, batch)
        handle.wait()
        strategy.load_checkpoint(path, state)
        return moment, bits_of(strategy, model, optimizer)


def steps_after_a_failure(subject: Subject, path: Path) -> str:
    """Take a step when an async save has failed; return what it raised."""
    with subject.strategy() as strategy:
        model, optimizer = trained(strategy)
        handle = strategy.save_checkpoint(path, {"model": model, "optimizer": optimizer}, blocking=False)
        while not handle.committed.done():
            time.sleep(0.01)
        try:
            step(strategy, model, optimizer, samples(1)[0])
        except CheckpointError as error:
            return str(error)
        return ""
