"""A checkpoint of one strategy and world size goes on under any other, bit for bit."""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from environment_worlds import EnvironmentWorlds
from environments import python_with
from resumed_run import STEPS, Leg, Notes, go_under
from strategy_chains import SIZES, Station, every_ordered_pair

from shard_core.testing.bits import assert_same_bits
from shard_core.testing.oracle import assert_same_numbers

Go = Callable[[Station, Leg], list[Notes]]

FORMS = ("sharded", "full")
#: Few processes, since each has to import its engine.
ONCE = [
    *(Station("fsdp", 3), Station("deepspeed_stage_3", 3), Station("tp", 2), Station("xla_fsdp", 2)),
    *(Station("deepspeed_stage_1", 3), Station("xla_spmd", 4), Station("ddp", 2), Station("ddp", 2)),
    *(Station("deepspeed_stage_2", 3), Station("single", 1)),
]


@pytest.fixture(scope="module")
def go(worlds: Any) -> Iterator[Go]:
    """Return a callable that runs a leg on the ranks of a station, which live on for the next."""
    held: dict[Path, Any] = {Path(sys.executable): worlds}

    def on(station: Station, leg: Leg) -> list[Notes]:
        python = python_with(station.strategy)
        if python not in held:
            held[python] = EnvironmentWorlds(python)
        world = held[python](station.ranks, station.environment)
        return world.run(go_under, station.strategy, station.options, leg, timeout=200)

    yield on
    for each in held.values():
        if each is not worlds:
            each.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", FORMS)
def test_walk_through_every_strategy(go: Go, tmp_path: Path, form: str) -> None:
    """Unlike engines, and environments with unlike versions of torch, read one another's checkpoints."""
    assert {station.strategy for station in ONCE} == set(SIZES)
    walk(go, ONCE, tmp_path, form)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", FORMS)
def test_walk_from_every_strategy_to_every_other(go: Go, tmp_path: Path, form: str) -> None:
    """Every ordered pair, at 1 to 4 ranks."""
    stations = every_ordered_pair()
    ways = set(itertools.pairwise(stations))
    assert {(before.strategy, after.strategy) for before, after in ways} == {(a, b) for a in SIZES for b in SIZES}
    assert {(station.strategy, station.size) for station in stations} == {(a, n) for a in SIZES for n in SIZES[a]}
    walk(go, stations, tmp_path, form)


def walk(go: Go, stations: list[Station], folder: Path, form: str) -> None:
    """Run station after station; each goes on as the one before did, and all as if never interrupted."""
    losses: list[float] = []
    before: list[Notes] = []
    for number, station in enumerate(stations):
        load = folder / str(number - 1) if number else None
        notes = go(station, Leg(seed=number, load=load, save=folder / str(number), further=STEPS, form=form))
        if number:
            assert_goes_on(f"{station} after {stations[number - 1]}", notes, before)
            assert notes[0].step == number * STEPS
            if station == stations[number - 1]:
                assert [each.taken.drawn for each in notes] == [each.further.drawn for each in before], str(station)
        losses += notes[0].taken.losses
        before = notes
    uninterrupted = go(Station("single", 1), Leg(steps=len(losses)))[0].taken.losses
    assert_same_numbers("the loss", losses, uninterrupted, 1e-6)


def assert_goes_on(where: str, notes: list[Notes], before: list[Notes]) -> None:
    """Compare what was loaded, and the first steps after it, with the run that was saved and went on."""
    assert_same_bits(where, notes[0].loaded, before[0].left)
    taken, further = notes[0].taken, before[0].further
    assert taken.samples == further.samples, f"{where} trains on other samples"
    assert_same_numbers(f"the loss of {where}", taken.losses, further.losses, 1e-6)
    if notes[0].data_ranks == before[0].data_ranks:
        for rank, (mine, theirs) in enumerate(zip(notes, before, strict=True)):
            for name in ("python", "numpy", "torch"):
                assert mine.taken.drawn[name] == theirs.further.drawn[name], (
                    f"{where} draws anew on rank {rank}: {name}"
                )
