"""Campaigns: many random programs of one strategy, until one shows a defect, which is shrunk."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import statistics
import time
import warnings
from collections import Counter
from typing import TYPE_CHECKING

from shard_core import plugins
from shard_core.errors import InvalidOption
from shard_core.testing.processes.worlds import Worlds
from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.coverage import Coverage, Share
from shard_core.testing.programs.grammar import draw
from shard_core.testing.programs.judgement import Judgement, judge, patience
from shard_core.testing.programs.kept import kept_programs
from shard_core.testing.programs.memory import Memory
from shard_core.testing.programs.program import ModelSpec, OptimizerSpec, Program, strategies_of
from shard_core.testing.programs.settings import splits_layers
from shard_core.testing.programs.shrinking import shrink
from shard_core.testing.programs.writing.script import script_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shard_core.plugins.info import StrategyInfo
    from shard_core.testing.processes.world import World

VERDICTS = ("equal", "refused", "defect")
_HANGS_WITHIN = 0.4
"""Of the patience, while a hang is shrunk: what takes that long hangs, and a minute has room for a few of them."""
_STARTS_WITHIN = 120.0
_PARTICULARS = re.compile(r"'[^']*'|\d+(?:\.\d+)?")
_FILES = (ops.Save, ops.Load, ops.Fail, ops.SavePretrained, ops.LoadWeights, ops.Switch)
"""Operations whose time is that of the disk."""
_HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
"""What keeps strategies on the CPU, where the oracle computes, unless another device is asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """A reason why programs were refused.

    Attributes:
        count: How many were.
        symptom: The operation and the exception.
        sentence: What one of them was told; the others' differ in names and numbers alone.
    """

    count: int
    symptom: str
    sentence: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defect:
    """A program that failed.

    Attributes:
        origin: The name of the kept program, or ``"seed 7"``.
        drawn: It, whole.
        program: What it was shrunk to.
        judgement: How that failed.
    """

    origin: str
    drawn: Program
    program: Program
    judgement: Judgement

    @property
    def script(self) -> str:
        """Return the shrunk program as a script."""
        return script_of(self.program, f"Found by {self.origin}: {self.judgement.symptom}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What came of a campaign.

    Attributes:
        strategy: Whose.
        world_size: How many ranks random programs had.
        others: Strategies that they went on under.
        verdicts: How many programs ended how.
        kept: How many of them were kept programs.
        settled: How many broke a bound and were found to be rounding.
        refusals: The most frequent reason first.
        seconds: How long the programs took, without starting ranks and shrinking.
        in_memory: How many programs neither compile nor touch files, and how long these took.
        growth: Bytes that a rank kept of each program, in the later half of them; None for too few to tell.
        grows: Whether that is more than a strategy may keep that lets go of what was torn down.
        median_length: Of the operations that were reached.
        pairs: Ordered pairs of operation kinds that were seen side by side.
        cells: Triples of an operation kind, a model part and a setting: the precision, an option, late optimizers.
        next_seed: Where another campaign would go on.
        defect: The first.
    """

    strategy: str
    world_size: int
    others: tuple[str, ...]
    verdicts: dict[str, int]
    kept: int
    settled: int
    refusals: tuple[Refusal, ...]
    seconds: float
    in_memory: tuple[int, float]
    growth: float | None
    grows: bool
    median_length: float
    pairs: Share
    cells: Share
    next_seed: int
    defect: Defect | None

    @property
    def count(self) -> int:
        """Return how many programs were run."""
        return sum(self.verdicts.values())

    @property
    def passed(self) -> bool:
        """Return whether no defect was found, memory growth included, and a tenth of the programs ran to their end.

        What is refused says nothing of what a strategy computes.
        """
        return self.defect is None and not self.grows and 10 * self.verdicts["equal"] >= self.count

    @property
    def programs_per_second(self) -> float:
        """Return how many programs were judged in a second."""
        return self.count / self.seconds if self.seconds else 0.0

    @property
    def in_memory_per_second(self) -> float:
        """Return how many programs were judged in a second that neither compile nor touch files."""
        count, seconds = self.in_memory
        return count / seconds if seconds else 0.0


class _Tally:
    """Counts judgements."""

    def __init__(self, coverage: Coverage) -> None:
        self.coverage = coverage
        self.verdicts = dict.fromkeys(VERDICTS, 0)
        self.settled = 0
        self.in_memory = (0, 0.0)
        self.lengths: list[int] = []
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._sentences: dict[tuple[str, str], str] = {}

    def add(self, program: Program, judgement: Judgement, seconds: float) -> None:
        if not program.compiled and not any(isinstance(each, _FILES) for each in program.operations):
            count, before = self.in_memory
            self.in_memory = count + 1, before + seconds
        self.verdicts[judgement.verdict] += 1
        self.settled += judgement.settled
        reached = len(program.operations) if judgement.verdict == "equal" else max(judgement.at, 0)
        self.lengths.append(reached)
        self.coverage.add(program, reached)
        if judgement.verdict == "refused":
            reason = judgement.symptom, _PARTICULARS.sub("…", judgement.text)
            self._refusals[reason] += 1
            self._sentences.setdefault(reason, judgement.text)

    def refusals(self) -> tuple[Refusal, ...]:
        ranked = self._refusals.most_common()
        return tuple(
            Refusal(count=count, symptom=reason[0], sentence=self._sentences[reason]) for reason, count in ranked
        )


def campaign(
    strategy: str,
    *,
    count: int,
    seed: int = 0,
    minutes: float | None = None,
    device: str = "",
    world_size: int = 2,
    sizes: Sequence[int] = (),
    others: Sequence[str] | None = None,
    worlds: Worlds | None = None,
    on_program: Callable[[str, Judgement], None] = lambda *_: None,
) -> Report:
    """Run the kept programs of a strategy, then random ones, until one shows a defect; shrink that.

    Args:
        strategy: The name of an installed strategy.
        count: How many random programs to run at most.
        seed: What the first is drawn from; the next from the next number.
        minutes: When to begin no other program.
        device: The device type that they compute on, as in ``Program``; kept programs are the CPU's and left out then.
        world_size: How many ranks.
        sizes: Numbers of ranks that programs may go on with.
        others: Strategies that programs may go on under; by default those that ``others_of`` finds.
        worlds: Where there are ranks already.
        on_program: Told of each program: where it is from, and what came of it.

    Returns:
        What came of them.

    Raises:
        UnknownStrategy: If nobody offers one of them.
        InvalidOption: If ranks share layers under the strategy, and there are several numbers of them.
    """
    info = plugins.find(strategy)
    if splits_layers(info) and sizes:
        raise InvalidOption(
            f"programs of {strategy!r}, whose ranks share layers, stay on as many ranks as they begin on: give one "
            f"number of them, such as {world_size}."
        )
    names = others_of(info, max([world_size, *sizes]), device or "cpu") if others is None else tuple(others)
    drawn = functools.partial(
        draw, strategy=strategy, device=device, world_size=world_size, others=names, sizes=tuple(sizes)
    )
    tally = _Tally(Coverage(strategy, world_size, names, device))
    kept = {name: each for name, each in kept_programs().items() if each.strategy == strategy and _is_possible(each)}
    kept = {} if device else kept
    end = time.monotonic() + 60 * minutes if minutes is not None else None
    defect = None
    memory = Memory()
    with _ranks(worlds, hidden=not device) as at_hand, quiet():
        # What starting ranks and importing an engine take says nothing about programs.
        judge(_nothing(strategy, device, world_size), at_hand, timeout=_STARTS_WITHIN)
        begun = time.monotonic()
        for origin, program in _programs(kept, range(seed, seed + count), drawn):
            if end is not None and time.monotonic() >= end:
                break
            started = time.monotonic()
            judgement = judge(program, at_hand)
            judgement = _as_kept(origin, judgement) if origin in kept else judgement
            tally.add(program, judgement, time.monotonic() - started)
            memory.follow(at_hand(world_size), compiled=bool(program.compiled))
            on_program(origin, judgement)
            if judgement.verdict == "defect":
                defect = origin, program, judgement
                break
        seconds = time.monotonic() - begun
        found = _shrunk(*defect, at_hand) if defect else None
    judged = sum(tally.verdicts.values())
    beyond = max(judged - len(kept), 0)
    return Report(
        strategy=strategy,
        world_size=world_size,
        others=names,
        verdicts=tally.verdicts,
        kept=judged - beyond,
        settled=tally.settled,
        refusals=tally.refusals(),
        seconds=seconds,
        in_memory=tally.in_memory,
        growth=memory.growth,
        grows=memory.grows,
        median_length=float(statistics.median(tally.lengths or [0])),
        pairs=tally.coverage.pairs,
        cells=tally.coverage.cells,
        next_seed=seed + beyond,
        defect=found,
    )


def replay(program: Program) -> Judgement:
    """Judge one program on ranks of its own.

    Raises:
        UnknownStrategy: If nobody offers a strategy that it names.
    """
    with _ranks(None, hidden=not program.device) as worlds, quiet():
        return judge(program, worlds)


def others_of(info: StrategyInfo, world_size: int, device: str = "cpu") -> tuple[str, ...]:
    """List the strategies that a strategy's programs can go on under in this environment.

    Args:
        info: The strategy's card.
        world_size: How many ranks.
        device: The device type.

    Returns:
        Names, without the strategy's own. None if it shares layers, or for one rank: data ranks stay as many.
    """
    if world_size == 1 or splits_layers(info):
        return ()
    able = [each.info for each in plugins.installed() if each.info is not None and each.problem is None]
    return tuple(
        each.name
        for each in able
        if each.name != info.name
        and device in each.devices
        and (each.max_ranks is None or each.max_ranks >= world_size)
        and not splits_layers(each)
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Compute on one thread, since ranks want the others, and hush what torch says of odd programs."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            # Odd places are what programs are for.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            yield
    finally:
        torch.set_num_threads(threads)


def _programs(kept: dict[str, Program], seeds: range, drawn: Callable[[int], Program]) -> Iterator[tuple[str, Program]]:
    yield from kept.items()
    for seed in seeds:
        yield f"seed {seed}", drawn(seed)


def _is_possible(program: Program) -> bool:
    """Check that all strategies that a kept program names are installed."""
    return strategies_of(program) <= {each.name for each in plugins.installed() if each.problem is None}


def _as_kept(name: str, judgement: Judgement) -> Judgement:
    """Return a defect for a kept program that no longer ends as it did: refused if its name says so, or else equal."""
    before = "refused" if name.startswith("refused-") else "equal"
    if judgement.verdict in (before, "defect"):
        return judgement
    text = judgement.text or "It runs to its end."
    return dataclasses.replace(judgement, verdict="defect", symptom=f"{judgement.verdict}, once {before}", text=text)


def _nothing(strategy: str, device: str, world_size: int) -> Program:
    """Return a program that ends with its setup."""
    models, optimizers = (ModelSpec(parts=("linear",)),), (OptimizerSpec(),)
    return Program(
        seed=0, strategy=strategy, device=device, world_size=world_size, models=models, optimizers=optimizers
    )


def _shrunk(origin: str, program: Program, found: Judgement, worlds: Callable[[int], World]) -> Defect:
    timeout = patience(program) * _HANGS_WITHIN if found.symptom == "hang" else None
    smaller, judgement = shrink(program, found, lambda each: judge(each, worlds, timeout=timeout))
    return Defect(origin=origin, drawn=program, program=judgement.onward or smaller, judgement=judgement)


@contextlib.contextmanager
def _ranks(worlds: Worlds | None, *, hidden: bool) -> Iterator[Callable[[int], World]]:
    """Yield what returns ranks, which may see no GPU: those that are there, or some that end with the campaign."""
    environment = _HIDDEN if hidden else {}
    if worlds is not None:
        yield lambda size: worlds(size, environment)
        return
    own = Worlds()
    try:
        yield lambda size: own(size, environment)
    finally:
        own.close()
