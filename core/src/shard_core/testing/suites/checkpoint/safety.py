"""A killed save and a damaged file are distinguished from a good checkpoint."""

from __future__ import annotations

import pickletools
import re
import shutil
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from shard_core.errors import CheckpointCorrupted, CheckpointError, CheckpointNotFound, MissingRank, RankFailed
from shard_core.testing.bits import Bits, assert_same_bits, bits_of, samples, trained
from shard_core.testing.crash_points import crash, crash_points
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.training import set_up, step

if TYPE_CHECKING:
    from shard_core.testing.strategy_under_test import Ranks, Subject

_NAME = "step-1"
_GUARD = timedelta(seconds=2)
_FEWEST_OPERATIONS = 4
_PICKLE_IN_BASE64 = re.compile(rb"gA[SW]V")


class Safety(Suite):
    """A killed save and a damaged file are distinguished from a good checkpoint."""

    @promise(after=("optimizer_made_before_or_after_setup",), every_size=False)
    def test_holds_no_pickle(self, ranks: Ranks, tmp_path: Path) -> None:
        """No file of a checkpoint holds a pickle, and an object that only a pickle could hold is refused by name.

        Usual cause:
            Something is kept with ``torch.save``, or with a library that pickles its metadata.
        """
        refusals = ranks.run(saves_values, tmp_path)
        files = [file for file in sorted(tmp_path.rglob("*")) if file.is_file()]
        assert files, "the checkpoint has no files"
        pickled = [str(file.relative_to(tmp_path)) for file in files if _holds_pickle(file.read_bytes())]
        assert not pickled, f"{pickled} hold pickles: whoever loads the checkpoint runs what stands in them"
        assert all("'odd" in refusal for refusal in refusals), (
            f"an object that is no tensor and no JSON value, saved as 'odd', should be refused by name; "
            f"the answers were {refusals}"
        )

    @promise(after=("round_trip_is_bitwise", "moments_come_back", "holds_no_pickle"), every_size=False)
    def test_corrupted_byte_is_named(self, ranks: Ranks, tmp_path: Path) -> None:
        """A load over a damaged byte is refused on every rank, names the tensor or the file, and changes nothing.

        Usual cause:
            Checksums are not written, not compared, or compared after the tensors were filled.
        """
        saved = ranks.run(saves, tmp_path / _NAME)[0]
        damaged = _damage(tmp_path)
        refused = set()
        for rank, answers in enumerate(ranks.run(loads_damaged, list(damaged))):
            for (path, file), (refusal, before, after) in zip(damaged.items(), answers, strict=True):
                where = f"on rank {rank}, with a damaged byte in {file!r} ({path.name}),"
                if rank == 0:
                    # A byte nobody needs, the padding of a header say, may be anything.
                    assert_same_bits(f"{where} after the load", after, before if refusal else saved)
                if refusal:
                    refused.add(file)
                    named = [name for name in (*saved, Path(file).stem) if name.removeprefix("model.") in refusal]
                    assert named, f"{where} the refusal names neither a tensor nor the file: {refusal}"
        unguarded = {*damaged.values()} - refused
        assert not unguarded, f"damage in {sorted(unguarded)} was never noticed"

    @promise(after=("round_trip_is_bitwise", "moments_come_back", "holds_no_pickle"), every_size=False)
    @pytest.mark.parametrize("form", ["sharded", "full"])
    def test_killed_save_leaves_the_old_or_the_new(self, ranks: Ranks, tmp_path: Path, form: str) -> None:
        """Whenever a save is killed, the checkpoint that was there loads, or the new one; half of one never.

        What every file operation of a save leaves is checked, and one rank is killed for good.

        Usual cause:
            The old checkpoint is removed or written over before the new one is complete.
        """
        for kind in ("first", "replacing"):
            folder = tmp_path / kind
            (folder / "run").mkdir(parents=True)
            answers = ranks.run(saves_watched, folder, form, kind == "replacing")
            old, new = answers[0][:2]
            left = [path for _, _, paths, _ in answers for path in paths]
            found = ranks.run(loads_all, [path / _NAME for path in left])[0]
            assert len({*map(str, left)}) > len(answers), "a save of a checkpoint makes no file operations to be seen"
            for place, (path, bits) in enumerate(zip(left, found, strict=True)):
                where = f"at moment {place} of {len(left)} of a {kind} save ({path})"
                _assert_old_or_new(where, bits, old, new)
        if form == "sharded":
            _kill_one(ranks, tmp_path / "replacing" / "run", [answer[3] for answer in answers])

    @promise(after=("optimizer_made_before_or_after_setup",), every_size=False)
    @pytest.mark.parametrize("call", ["save_checkpoint", "load_checkpoint"])
    def test_missing_rank_is_named_in_save(self, ranks: Ranks, tmp_path: Path, call: str) -> None:
        """A rank that does not come to a save or a load is named within ``guard_timeout`` to those that came.

        Usual cause:
            The ranks communicate before anyone checks that all are there, so that a call under ``if rank == 0`` hangs.
        """
        if ranks.size == 1:
            return  # nobody can be missing
        if call == "load_checkpoint":
            ranks.run(saves, tmp_path / _NAME)
        absent = ranks.size - 1
        for rank, message in enumerate(ranks.run(misses_one, tmp_path / _NAME, call)[:absent]):
            assert re.search(rf"\brank {absent}\b", message), (
                f"rank {absent} did not come to {call}, and rank {rank} got {message!r}"
            )


def _holds_pickle(data: bytes) -> bool:
    """Return whether bytes hold a pickle: as a whole, somewhere inside, or in base64."""
    starts = [0, *(match.start() for match in re.finditer(rb"\x80[\x02-\x05]", data))]
    return _PICKLE_IN_BASE64.search(data) is not None or any(_begins_pickle(data[start:]) for start in starts)


def _begins_pickle(data: bytes) -> bool:
    try:
        return sum(1 for _ in pickletools.genops(data)) >= _FEWEST_OPERATIONS
    except ValueError:
        return False


class Odd:
    """An object without ``state_dict``."""


def saves_values(subject: Subject, folder: Path) -> str:
    """Save plain values beside a model, then an object that cannot be saved; give the refusal."""
    with subject.strategy() as strategy:
        model, optimizer = trained(strategy, "plain")
        values = {"step": 1, "nested": {"pair": (1, [2.5, None]), 3: "text"}, "history": torch.zeros(3)}
        state = {"model": model, "optimizer": optimizer, **values}
        strategy.save_checkpoint(folder / "values", state)
        strategy.save_checkpoint(folder / "full", state, state_dict_type="full")
        try:
            strategy.save_checkpoint(folder / "refused", {**state, "odd": Odd()})
        except CheckpointError as error:
            return str(error)
        return ""


def _damage(folder: Path) -> dict[Path, str]:
    """Copy a checkpoint once for each byte that is changed; give the copies and the files they are damaged in."""
    found: dict[Path, str] = {}
    for file in sorted((folder / _NAME).rglob("*")):
        size = file.stat().st_size if file.is_file() else 0
        for place in sorted({size // 2, size - 1}) if size else ():
            copy = folder / f"damaged-{len(found)}"
            shutil.copytree(folder / _NAME, copy)
            name = file.relative_to(folder / _NAME)
            data = bytearray(file.read_bytes())
            data[place] ^= 0x40
            (copy / name).write_bytes(data)
            found[copy] = str(name)
    return found


def saves(subject: Subject, path: Path) -> Bits:
    """Save a trained model and its optimizer; give all bits."""
    with subject.strategy() as strategy:
        model, optimizer = trained(strategy, "plain", "sgd")
        strategy.save_checkpoint(path, {"model": model, "optimizer": optimizer})
        return bits_of(strategy, model, optimizer)


def loads_damaged(subject: Subject, paths: list[Path]) -> list[tuple[str, Bits, Bits]]:
    """Load each checkpoint; return the error, and all bits before and after."""
    found = []
    with subject.strategy() as strategy:
        model, optimizer = trained(strategy, "plain", "sgd", seed=1)
        for path in paths:
            before = bits_of(strategy, model, optimizer)
            refusal = ""
            try:
                strategy.load_checkpoint(path, {"model": model, "optimizer": optimizer})
            except CheckpointCorrupted as error:
                refusal = str(error)
            found.append((refusal, before, bits_of(strategy, model, optimizer)))
            # So that the next load has something to change.
            step(strategy, model, optimizer, samples(1)[0])
    return found


def saves_watched(
    subject: Subject, folder: Path, form: str, replacing: bool
) -> tuple[Bits | None, Bits, list[Path], int]:
    """Save, and copy what every operation leaves; give the old and the new bits, the copies and the operations."""
    path = folder / "run" / _NAME
    with subject.strategy() as strategy:
        model, optimizer = trained(strategy, "plain", "sgd")
        state = {"model": model, "optimizer": optimizer}
        old = None
        if replacing:
            strategy.save_checkpoint(path, state, state_dict_type=form)
            old = bits_of(strategy, model, optimizer)
            step(strategy, model, optimizer, samples(1)[0])
        new = bits_of(strategy, model, optimizer)
        with crash_points(folder / "run", folder / f"left-by-rank-{strategy.global_rank}") as found:
            strategy.save_checkpoint(path, state, state_dict_type=form)
        return old, new, found.left, found.changes


def loads_all(subject: Subject, paths: list[Path]) -> list[Bits | str | None]:
    """Load each checkpoint; give its bits, what was wrong with it, or nothing if there was none."""
    found: list[Bits | str | None] = []
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, "plain", "sgd", seed=1)
        for path in paths:
            try:
                strategy.load_checkpoint(path, {"model": model, "optimizer": optimizer})
                found.append(bits_of(strategy, model, optimizer))
            except CheckpointNotFound:
                found.append(None)
            except CheckpointError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def _assert_old_or_new(where: str, bits: Bits | str | None, old: Bits | None, new: Bits) -> None:
    assert not isinstance(bits, str), f"{where} there is a checkpoint that does not load: {bits}"
    assert bits is not None or old is None, f"{where} there is no checkpoint any more"
    if bits is None or (old is not None and all(torch.equal(bits[name], old[name]) for name in old)):
        return
    assert_same_bits(f"{where} neither the old checkpoint is there nor the new one: compared with the new", bits, new)


def _kill_one(ranks: Ranks, folder: Path, changes: list[int]) -> None:
    """Kill one rank in the middle of a save that replaces a checkpoint, and look at what all have left."""
    victim = max(rank for rank, count in enumerate(changes) if count)
    path, twin = folder / _NAME, folder / "twin"
    (old,) = ranks.run(loads_all, [path])[0]
    with pytest.raises(RankFailed, match=f"rank {victim} died with exit code -9"):
        ranks.run(is_killed, path, twin, victim, changes[victim] // 2 + 1)
    # The ranks that answer from now on are new ones.
    found, new = ranks.run(loads_all, [path, twin])[0]
    _assert_old_or_new(f"after rank {victim} was killed in a save", found, old, new)
    saved = ranks.run(saves, path)[0]
    assert_same_bits("after a save over what a killed one left", ranks.run(loads_all, [path])[0][0], saved)


def is_killed(subject: Subject, path: Path, twin: Path, victim: int, change: int) -> None:
    """Save, and once more into a checkpoint that is there, in which one rank dies."""
    with subject.strategy() as strategy:
        model, optimizer = trained(strategy, "plain", "sgd", seed=2)
        state = {"model": model, "optimizer": optimizer}
        strategy.save_checkpoint(twin, state)
        if strategy.global_rank == victim:
            with crash(path.parent, change):
                strategy.save_checkpoint(path, state)
        else:
            strategy.save_checkpoint(path, state)


def misses_one(subject: Subject, path: Path, call: str) -> str:
    """Keep the last rank from a call; return the errors of the others."""
    with subject.strategy(guard_timeout=_GUARD) as strategy:
        model, optimizer = set_up(strategy, "plain", "sgd")
        if strategy.global_rank < strategy.world_size - 1:
            try:
                getattr(strategy, call)(path, {"model": model, "optimizer": optimizer})
            except MissingRank as error:
                return str(error)
        return ""
