"""Measures random programs by mutants: small changes of what computes, that programs have to notice.

``python integration_tests/mutants.py --count 200 --programs 60`` draws mutants by seed, judges those that the ledger
lacks, and prints what came of all. A mutant is judged by programs whose run on the original reaches its statement; its
ranks import the changed file from memory.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

from mutated_ranks import MutatedWorld, TracedWorld
from mutation import ROOT, TARGETS, Mutant, drawn, equivalent

from shard_core import plugins
from shard_core.testing.processes.world import World
from shard_core.testing.programs import Judgement, Program, draw, judge
from shard_core.testing.programs.campaign import others_of, quiet
from shard_core.testing.programs.kept import kept_programs
from shard_core.testing.programs.settings import splits_layers

_REFUSED_AT_LEAST = 8
"""How many programs more than the original's must be refused for a mutant to count as one that refuses."""
_ALONE = 8
"""Of so many seeds, one draws a program of one rank."""
_SQUARE = ("tp", "hsdp")
"""Strategies of two dimensions; of as many seeds, one draws a program of four ranks, two in each, or else of three."""
_MORE = 4
"""What is left of the seeds of these."""
_RESIZED = 1
"""What is left of seeds, divided by ``_ALONE``, whose programs go on with another number of ranks."""
_FRESH = 10_000
"""The seed of the first program that is not run on the original before."""
_HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Original:
    """A program that runs on the original as it should.

    Attributes:
        strategy: Whose.
        origin: Its name, or its seed; a name that begins with ``refused-`` is of one that is to be refused.
        seconds: How long it took, traced.
        lines: Of each file that is mutated, which it reached.
    """

    strategy: str
    origin: str
    seconds: float
    lines: dict[str, list[int]]

    def program(self) -> Program:
        """Return the program."""
        if not self.origin.startswith("seed "):
            return kept_programs()[self.origin]
        seed, ranks = int(self.origin.removeprefix("seed ")), _ranks(self.strategy)
        card = plugins.find(self.strategy)
        more = 4 if self.strategy in _SQUARE else min(3, card.max_ranks or 3)
        ranks = {0: 1, _MORE: more}.get(seed % _ALONE, ranks)
        sizes = (1, 2) if seed % _ALONE == _RESIZED and not splits_layers(card) else ()
        return draw(seed, self.strategy, world_size=ranks, others=others_of(card, ranks), sizes=sizes)

    @property
    def verdict(self) -> str:
        """What comes of it."""
        return "refused" if self.origin.startswith("refused-") else "equal"


def originals(file: Path, count: int) -> list[Original]:
    """Run programs of every strategy that judges mutants on the original, or read what came of it.

    Args:
        file: Where that is kept.
        count: How many programs of each strategy.
    """
    if file.exists():
        return [Original(**record) for record in json.loads(file.read_text())]
    places = [str(ROOT / place) for place in TARGETS]
    found = []
    for strategy in dict.fromkeys(itertools.chain.from_iterable(TARGETS.values())):
        kept = [name for name, program in kept_programs().items() if program.strategy == strategy]
        names = [*kept, *(f"seed {seed}" for seed in range(count - len(kept)))]
        for name in names:
            empty = Original(strategy=strategy, origin=name, seconds=0.0, lines={})
            program = empty.program()
            traced = functools.partial(_traced, places=places)
            traced(program.world_size).reached.clear()
            begun = time.monotonic()
            if judge(program, traced).verdict == empty.verdict:
                lines: dict[str, list[int]] = {}
                for path, number in sorted(traced(program.world_size).reached):
                    lines.setdefault(str(Path(path).relative_to(ROOT)), []).append(number)
                found.append(dataclasses.replace(empty, seconds=time.monotonic() - begun, lines=lines))
    file.write_text(json.dumps([dataclasses.asdict(each) for each in found]))
    return found


def judged(mutant: Mutant, reaching: list[Original]) -> dict:
    """Judge a mutant by some programs; return its line of the ledger."""
    record = dataclasses.asdict(mutant)
    worlds: dict[int, MutatedWorld] = {}
    refused: list[str] = []

    def mutated(size: int) -> MutatedWorld:
        if size not in worlds:
            worlds[size] = MutatedWorld(size, _HIDDEN, str(ROOT / mutant.file), mutant.applied())
        return worlds[size]

    try:
        for count, each in enumerate(reaching, 1):
            program = each.program()
            judgement = judge(program, mutated)
            if judgement.verdict == each.verdict or not _is_right(each, program):
                continue
            # A campaign takes a kept program that ends in another way for a defect.
            noticed = judgement.verdict == "defect" or not each.origin.startswith("seed ")
            if noticed and _holds(judgement, program, mutated):
                by = f"{each.strategy} {each.origin}: {judgement.symptom or judgement.verdict}"
                return {**record, "verdict": "found", "by": by, "programs": count}
            if judgement.verdict == "refused":
                refused.append(f"{each.strategy}: {judgement.text}")
            if len(refused) >= min(_REFUSED_AT_LEAST, len(reaching)):
                return {**record, "verdict": "refuses", "by": refused[0], "programs": count}
    finally:
        for world in worlds.values():
            world.close()
    return {**record, "verdict": "survived" if reaching else "not reached", "by": "", "programs": len(reaching)}


def _is_right(original: Original, program: Program) -> bool:
    """Check that a program runs well on the original, where that is not known."""
    return bool(original.lines) or judge(program, _original_world).verdict == "equal"


@functools.cache
def _original_world(size: int) -> World:
    return World(size, _HIDDEN)


def fresh(mutant: Mutant, count: int) -> list[Original]:
    """List programs that nobody has run, whether they reach a mutant's statement or not."""
    names = itertools.cycle(_judges(mutant))
    return [Original(strategy=next(names), origin=f"seed {_FRESH + n}", seconds=0.0, lines={}) for n in range(count)]


def _judges(mutant: Mutant) -> tuple[str, ...]:
    """Return the strategies whose programs judge a mutant."""
    return next(names for place, names in TARGETS.items() if mutant.file.startswith(place))


def _holds(judgement: Judgement, program: Program, worlds: Callable[[int], MutatedWorld]) -> bool:
    """Judge what hung once more: on a busy machine it may have been slow."""
    return judgement.symptom != "hang" or judge(program, worlds).verdict == "defect"


def reaches(original: Original, mutant: Mutant) -> bool:
    """Check whether a program reaches a mutant's statement; what stands outside functions is reached by importing."""
    first, last, inside = _statement(mutant)
    lines = original.lines.get(mutant.file, [])
    return original.strategy in _judges(mutant) and (not inside or any(first <= line <= last for line in lines))


@functools.lru_cache(maxsize=1)  # asked of every program
def _statement(mutant: Mutant) -> tuple[int, int, bool]:
    """Return the lines of a mutant's statement, or of a block's head, and whether it stands in a function."""
    first, last, inside = mutant.line, mutant.line, False
    for node in ast.walk(ast.parse((ROOT / mutant.file).read_bytes())):  # from the outside in
        if isinstance(node, ast.stmt) and node.lineno <= mutant.line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            first, last = node.lineno, (body[0].lineno - 1 if body else node.end_lineno) or 0
            inside = inside or (isinstance(node, ast.FunctionDef) and mutant.line >= node.body[0].lineno)
    return first, max(first, last), inside


def in_turn(known: list[Original]) -> list[Original]:
    """Order programs so that strategies and precisions take turns; of each, the short ones come first."""
    groups: dict[tuple[str, str], list[Original]] = collections.defaultdict(list)
    for each in sorted(known, key=lambda each: (each.origin.startswith("seed "), each.seconds)):
        groups[each.strategy, each.program().precision].append(each)
    rounds = itertools.zip_longest(*groups.values())
    return [each for group in rounds for each in group if each is not None]


def _ranks(strategy: str) -> int:
    return min(2, plugins.find(strategy).max_ranks or 2)


@functools.cache
def _traced_worlds() -> dict[int, TracedWorld]:
    return {}


def _traced(size: int, places: list[str]) -> TracedWorld:
    return _traced_worlds().setdefault(size, TracedWorld(size, _HIDDEN, places))


def _ledger(file: Path) -> dict[str, dict]:
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {_key(line): line for line in lines}


def _key(line: dict) -> str:
    return f"{line['file']}: {line['said']} -> {line['text']}"


def summary(lines: list[dict], mutants: dict[str, Mutant]) -> str:
    """Return a table by place and by operator, and the survivors' diffs."""
    verdicts = ("found", "refuses", "survived", "not reached")
    rows = [f"{'':40}" + "".join(f"{each:>12}" for each in verdicts)]
    places = {each["file"]: next(place for place in TARGETS if each["file"].startswith(place)) for each in lines}
    for name in (lambda line: places[line["file"]], lambda line: line["operator"]):
        tally = collections.Counter((name(line), line["verdict"]) for line in lines)
        for row in sorted({row for row, _ in tally}):
            rows.append(f"{row:40}" + "".join(f"{tally[row, each]:12}" for each in verdicts))
        rows.append("")
    for line in lines:
        if line["verdict"] == "survived":
            diff = mutants[_key(line)].diff()
            rows.append(f"{line['file']}, {line['operator']}, {line['programs']} programs\n{diff}")
    return "\n".join(rows)


def main() -> None:
    """Judge the mutants that the ledger lacks and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--programs", type=int, default=60, help="at most so many for one mutant")
    parser.add_argument("--drawn", type=int, default=100, help="so many of each strategy are run on the original")
    parser.add_argument("--minutes", type=float, default=60.0, help="when to begin no other mutant")
    parser.add_argument("--ledger", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument(
        "--lane", default="1/1", help="judge every second of them, say, from the first: 1/2; each lane has its ledger"
    )
    parser.add_argument("--fresh", type=int, default=0, help="with --again: by so many programs more, of other seeds")
    parser.add_argument("--again", action="store_true", help="judge survivors and what was not reached by more")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    known = originals(given.ledger.with_suffix(".originals.json"), given.drawn)
    judgements = _ledger(given.ledger)
    lane, lanes = map(int, given.lane.split("/"))
    alike = equivalent()
    every = drawn(given.count, given.seed)[lane - 1 :: lanes]
    chosen = [mutant for mutant in every if mutant.place not in alike]
    with given.ledger.open("a") as ledger, quiet():
        for mutant in chosen:
            key = _key(dataclasses.asdict(mutant))
            open_still = given.again and judgements.get(key, {}).get("verdict") in ("survived", "not reached")
            if (key in judgements and not open_still) or time.monotonic() >= end:
                continue
            before = judgements[key]["programs"] if open_still else 0
            reaching = in_turn([each for each in known if reaches(each, mutant)])[before : given.programs]
            programs = fresh(mutant, given.fresh) if given.again and given.fresh else reaching
            if open_still and not programs:
                continue
            found = judged(mutant, programs)
            judgements[key] = {**found, "programs": before + found["programs"]}
            ledger.write(json.dumps(judgements[key]) + "\n")
            ledger.flush()
    drawn_now = {_key(dataclasses.asdict(each)): each for each in chosen}
    print(f"{len(every) - len(chosen)} of {len(every)} are named in equivalent_mutants.json.")
    print(summary([judgements[key] for key in drawn_now if key in judgements], drawn_now))


if __name__ == "__main__":
    main()
