"""Measures random programs by mutants: small changes of what computes, that programs have to notice.

``python integration_tests/mutants.py --count 200 --programs 60`` draws mutants by seed, judges those that the ledger
lacks, and prints what came of all. A mutant is judged by programs whose run on the original reaches its statement; its
ranks import the changed file from memory. Strings, annotations, logs, ``raise`` and what only refuses are never
changed, nor files that no program comes to: nothing computes there.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import difflib
import functools
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mutated_ranks import MutatedWorld, TracedWorld

from shard_core import plugins
from shard_core.testing.programs import Judgement, Program, draw, judge
from shard_core.testing.programs.campaign import others_of, quiet
from shard_core.testing.programs.kept import kept_programs

ROOT = Path(__file__).resolve().parents[1]
#: What is mutated, and whose programs judge it.
TARGETS = {
    "core/src/shard_core/strategy": ("ddp", "fsdp", "deepspeed_stage_2", "tp"),
    "core/src/shard_core/gradients.py": ("ddp", "fsdp", "tp", "fsdp_cpu_offload"),
    "core/src/shard_core/fully_shard": ("fsdp", "tp", "hsdp"),
    "packages/shard-fsdp/src": ("fsdp", "hsdp", "fsdp_cpu_offload"),
    "packages/shard-deepspeed/src": ("deepspeed_stage_3", "deepspeed_stage_2", "deepspeed_stage_1", "deepspeed"),
    "packages/shard-tp/src": ("tp",),
}
#: Of these, files in which nothing computes that a program comes to, and what they are for.
ELSEWHERE = {
    "core/src/shard_core/strategy/quantization.py": "names a quantized layer, to refuse it",
    "packages/shard-deepspeed/src/shard_deepspeed/tuning.py": "what shard tune measures",
    "packages/shard-fsdp/src/shard_fsdp/tuning.py": "what shard tune measures",
    "packages/shard-tp/src/shard_tp/tuning.py": "what shard tune measures",
    "packages/shard-tp/src/shard_tp/consistency.py": "finds ranks that differ; a program's do not",
    "packages/shard-tp/src/shard_tp/dropout.py": "programs have no dropout where ranks share layers",
}
_REFUSES = re.compile(r"_*(check|refuse|require)(_|$)")
"""The names of functions that change nothing, and are never mutated nor left out."""
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult
}  # fmt: skip
_REFUSED_AT_LEAST = 8
"""How many programs more than the original's must be refused for a mutant to count as one that refuses."""
_HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: Relative to the repository.
        operator: What kind of change.
        line: Where it begins.
        start: The first byte that is replaced.
        end: The first that is not.
        text: What stands there instead.
    """

    file: str
    operator: str
    line: int
    start: int
    end: int
    text: str

    def applied(self) -> str:
        """Return the file with the change."""
        source = (ROOT / self.file).read_bytes()
        return (source[: self.start] + self.text.encode() + source[self.end :]).decode()

    def diff(self) -> str:
        """Return the change as a diff without context."""
        before = (ROOT / self.file).read_text().splitlines()
        lines = difflib.unified_diff(before, self.applied().splitlines(), self.file, self.file, n=0, lineterm="")
        return "\n".join(list(lines)[2:])


def drawn(count: int, seed: int) -> list[Mutant]:
    """Draw mutants from all there are; a larger count begins with those of a smaller one."""
    files = [file for place in TARGETS for file in _files(place) if str(file.relative_to(ROOT)) not in ELSEWHERE]
    found = [mutant for file in files for mutant in mutants_of(file)]
    random.Random(seed).shuffle(found)
    return found[:count]


def _files(place: str) -> list[Path]:
    path = ROOT / place
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def mutants_of(file: Path) -> list[Mutant]:
    """List every mutant of a file."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    computing = list(_computing(ast.parse(source)))
    tests = {node.test for node in computing if isinstance(node, ast.If | ast.IfExp | ast.While)}
    for node in computing:
        changes = list(_changes(node))
        if node in tests and isinstance(node, ast.Name | ast.Attribute | ast.Call):
            changes.append(("condition", f"(not {ast.unparse(node)})"))
        for operator, text in changes:
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            name = str(file.relative_to(ROOT))
            found.append(Mutant(file=name, operator=operator, line=node.lineno, start=start, end=end, text=text))
    return found


def _computing(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what computes: neither annotations nor what makes, logs or leads to a message alone."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _says(child):
                yield child
                yield from _computing(child)


def _says(node: ast.AST) -> bool:
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.Assert() | ast.FunctionDef(name="__repr__" | "__dir__"):
            return True
        case ast.FunctionDef(name=name) if _REFUSES.match(name):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.If(body=[*_, ast.Raise()], orelse=[]) | ast.ExceptHandler(body=[ast.Raise()]):
            return True
        case ast.Call(func=ast.Name(id="option")) | ast.ImportFrom() | ast.Import():
            return True  # options are cards to read; what checks and uses them computes
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))) if _REFUSES.match(name):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "warnings"))):
            return True
    return isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _says(node.value))


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """List the operators that change a node, and its text after each."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARED:
            yield "comparison", _with(node, ops=[_COMPARED[type(op)]()])
        case ast.BinOp(op=op, left=left) if type(op) in _COMPUTED and not _is_text(left):
            yield "arithmetic", _with(node, op=_COMPUTED[type(op)]())
        case ast.BoolOp(op=op):
            yield "boolean", _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "boolean", f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", str(value + 1)
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield "deleted", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "deleted", "pass"
        case ast.Return(value=ast.AST() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "returns None", "return None"
        case ast.Call(args=[first, second, *rest]) if _can_swap(first, second, rest):
            yield "arguments", _with(node, args=[second, first, *rest])


def _can_swap(first: ast.expr, second: ast.expr, rest: list[ast.expr]) -> bool:
    starred = any(isinstance(each, ast.Starred) for each in (first, second, *rest))
    return not starred and ast.dump(first) != ast.dump(second)


def _with(node: ast.AST, **fields: object) -> str:
    values = dict(ast.iter_fields(node)) | fields
    return f"({ast.unparse(type(node)(**values))})"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Original:
    """A program that runs well on the original.

    Attributes:
        strategy: Whose.
        origin: Its name, or its seed.
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
        others = others_of(plugins.find(self.strategy), 2)
        return draw(
            int(self.origin.removeprefix("seed ")), self.strategy, world_size=_ranks(self.strategy), others=others
        )


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
            if judge(program, traced).verdict == "equal":
                lines: dict[str, list[int]] = {}
                for path, number in sorted(traced(program.world_size).reached):
                    lines.setdefault(str(Path(path).relative_to(ROOT)), []).append(number)
                found.append(dataclasses.replace(empty, seconds=time.monotonic() - begun, lines=lines))
    file.write_text(json.dumps([dataclasses.asdict(each) for each in found]))
    return found


def judged(mutant: Mutant, known: list[Original], programs: int) -> dict:
    """Judge a mutant by programs that reach its statement; return its line of the ledger."""
    reaching = in_turn([each for each in known if reaches(each, mutant)])[:programs]
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
            if judgement.verdict == "defect" and _holds(judgement, program, mutated):
                by = f"{each.strategy} {each.origin}: {judgement.symptom}"
                return {**record, "verdict": "found", "by": by, "programs": count}
            if judgement.verdict == "refused":
                refused.append(f"{each.strategy}: {judgement.text}")
            if len(refused) >= min(_REFUSED_AT_LEAST, len(reaching)):
                return {**record, "verdict": "refuses", "by": refused[0], "programs": count}
    finally:
        for world in worlds.values():
            world.close()
    return {**record, "verdict": "survived" if reaching else "not reached", "by": "", "programs": len(reaching)}


def _holds(judgement: Judgement, program: Program, worlds: Callable[[int], MutatedWorld]) -> bool:
    """Judge what hung once more: on a busy machine it may have been slow."""
    return judgement.symptom != "hang" or judge(program, worlds).verdict == "defect"


def reaches(original: Original, mutant: Mutant) -> bool:
    """Check whether a program reaches a mutant's statement; what stands outside functions is reached by importing."""
    first, last, inside = _statement(mutant)
    lines = original.lines.get(mutant.file, [])
    strategies = next(names for place, names in TARGETS.items() if mutant.file.startswith(place))
    return original.strategy in strategies and (not inside or any(first <= line <= last for line in lines))


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
    """Order programs so that strategies take turns; each strategy's short ones come first."""
    by_strategy: dict[str, list[Original]] = collections.defaultdict(list)
    for each in sorted(known, key=lambda each: (each.origin.startswith("seed "), each.seconds)):
        by_strategy[each.strategy].append(each)
    rounds = itertools.zip_longest(*by_strategy.values())
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
    return f"{line['file']}:{line['start']}:{line['end']}:{line['text']}"


def summary(lines: list[dict]) -> str:
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
            fields = {field.name: line[field.name] for field in dataclasses.fields(Mutant)}
            rows.append(f"{line['file']}, {line['operator']}, {line['programs']} programs\n{Mutant(**fields).diff()}")
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
    parser.add_argument("--again", action="store_true", help="judge survivors and what was not reached again")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    known = originals(given.ledger.with_suffix(".originals.json"), given.drawn)
    judgements = _ledger(given.ledger)
    lane, lanes = map(int, given.lane.split("/"))
    chosen = drawn(given.count, given.seed)[lane - 1 :: lanes]
    with given.ledger.open("a") as ledger, quiet():
        for mutant in chosen:
            key = _key(dataclasses.asdict(mutant))
            open_still = given.again and judgements.get(key, {}).get("verdict") in ("survived", "not reached")
            if (key in judgements and not open_still) or time.monotonic() >= end:
                continue
            judgements[key] = judged(mutant, known, given.programs)
            ledger.write(json.dumps(judgements[key]) + "\n")
            ledger.flush()
    keys = [_key(dataclasses.asdict(each)) for each in chosen]
    print(summary([judgements[key] for key in keys if key in judgements]))


if __name__ == "__main__":
    main()
