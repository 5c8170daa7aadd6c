"""Measures random programs by mutants: small changes of what computes, each on a copy, that programs have to notice.

``python integration_tests/mutants.py --count 200 --programs 40`` draws mutants by seed, judges those that the ledger
lacks, and prints what came of all. Strings, annotations, logs, ``raise`` and conditions that only refuse are never
changed: nothing computes there.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: What is mutated, and whose programs judge it.
TARGETS = {
    "core/src/shard_core/strategy": ("ddp", "fsdp", "hsdp"),
    "core/src/shard_core/gradients.py": ("ddp", "fsdp", "tp"),
    "core/src/shard_core/fully_shard": ("fsdp",),
    "packages/shard-fsdp/src": ("fsdp", "hsdp"),
    "packages/shard-deepspeed/src": ("deepspeed_stage_3", "deepspeed_stage_2", "deepspeed_stage_1"),
    "packages/shard-tp/src": ("tp",),
}
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult
}  # fmt: skip
_REFUSED_AT_LEAST = 8
"""How many programs more than the original's must be refused for a mutant to count as one that refuses."""
_START_SECONDS = 60.0


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
    found = [mutant for place in TARGETS for file in _files(place) for mutant in mutants_of(file)]
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
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.If(body=[*_, ast.Raise()], orelse=[]) | ast.ExceptHandler(body=[ast.Raise()]):
            return True
        case ast.Call(func=ast.Name(id="option")) | ast.ImportFrom() | ast.Import():
            return True  # options are cards to read; what checks and uses them computes
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
        case ast.Call(args=[first, second, *rest]) if not any(isinstance(e, ast.Starred) for e in node.args):
            yield "arguments", _with(node, args=[second, first, *rest])


def _with(node: ast.AST, **fields: object) -> str:
    values = dict(ast.iter_fields(node)) | fields
    return f"({ast.unparse(type(node)(**values))})"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """Copy all source trees; mutants are applied there alone."""
    with tempfile.TemporaryDirectory(prefix="shard-mutants-") as folder:
        for source in sorted([ROOT / "core/src", *ROOT.glob("packages/shard-*/src")]):
            left_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, Path(folder, source.relative_to(ROOT)), ignore=left_out)
        yield Path(folder)


def _run(
    copy: Path, strategy: str, programs: int, seconds: float, expected: dict[str, str] | None
) -> dict[str, list[str]]:
    """Judge the programs of a strategy on a copy; return verdict, symptom and text of each that was reached."""
    sources = [str(folder) for folder in (copy / "core/src", *sorted(copy.glob("packages/*/src")))]
    variables = {"PYTHONPATH": os.pathsep.join(sources), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = ["nice", "-n", "10", sys.executable, __file__, "--judge", strategy, json.dumps(expected)]
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            [*command, "--programs", str(programs)],
            env={**os.environ, **variables, "DS_ACCELERATOR": "cpu"}, cwd=copy, stdout=output,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            child.wait(timeout=_START_SECONDS + seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        records: list[list[str]] = [json.loads(line) for line in output if line.startswith("[")]
    return {record[0]: record[1:] for record in records}


def _judge(strategy: str, programs: int, expected: dict[str, str] | None) -> None:
    """Print the judgement of each program, until one fails that should not: of the original itself, all."""
    from shard_core import plugins
    from shard_core.testing.processes.worlds import Worlds
    from shard_core.testing.programs import draw, judge
    from shard_core.testing.programs.campaign import others_of
    from shard_core.testing.programs.kept import kept_programs

    others = others_of(plugins.find(strategy), 2)
    chosen = {name: program for name, program in kept_programs().items() if program.strategy == strategy}
    chosen |= {f"seed {seed}": draw(seed, strategy, world_size=2, others=others) for seed in range(programs)}
    worlds = Worlds()
    try:
        for origin, program in list(chosen.items())[:programs]:
            judgement = judge(program, worlds(program.world_size, {"CUDA_VISIBLE_DEVICES": ""}))
            print(json.dumps([origin, judgement.verdict, judgement.symptom, judgement.text[-300:]]), flush=True)
            if expected is not None and judgement.verdict == "defect" and expected.get(origin) != "defect":
                break
    finally:
        worlds.close()


def judged(mutant: Mutant, copy: Path, programs: int, seconds: float, originals: dict[str, dict[str, str]]) -> dict:
    """Judge a mutant by programs of the strategies that use its file; return its line of the ledger."""
    target = copy / mutant.file
    target.write_text(mutant.applied())
    count, verdict, by = 0, "survived", ""
    try:
        strategies = next(names for place, names in TARGETS.items() if mutant.file.startswith(place))
        for strategy in strategies:
            original = originals[strategy]
            found = _run(copy, strategy, programs // len(strategies), seconds / len(strategies), original)
            count += len(found)
            new = {o: r for o, r in found.items() if r[0] != "equal" and original.get(o, "equal") == "equal"}
            defect = next((o for o, r in new.items() if r[0] == "defect"), None)
            if not found:
                verdict, by = "loud", f"{strategy}: nothing runs"
            elif defect is not None:
                verdict, by = "found", f"{strategy} {defect}: {found[defect][1]}"
            elif len(new) >= min(_REFUSED_AT_LEAST, len(found)):
                verdict, by = "refuses", f"{strategy}: {next(iter(new.values()))[2]}"
            if verdict != "survived":
                break
    finally:
        shutil.copy(ROOT / mutant.file, target)
    return {**dataclasses.asdict(mutant), "verdict": verdict, "by": by, "programs": count}


def _ledger(file: Path) -> dict[str, dict]:
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {_key(line): line for line in lines}


def _key(line: dict) -> str:
    return f"{line['file']}:{line['start']}:{line['end']}:{line['text']}"


def summary(lines: list[dict]) -> str:
    """Return a table by place and by operator, and the survivors' diffs."""
    verdicts = ("found", "loud", "refuses", "survived", "not reached")
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
    parser.add_argument("--programs", type=int, default=40, help="at most so many for one mutant")
    parser.add_argument("--seconds", type=float, default=90.0, help="at most so many for one mutant, beside its start")
    parser.add_argument("--minutes", type=float, default=60.0, help="when to begin no other mutant")
    parser.add_argument("--ledger", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--reached", type=Path, help="lines FILE:NUMBER that programs reach; others are not judged")
    parser.add_argument("--judge", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.judge:
        _judge(given.judge[0], given.programs, json.loads(given.judge[1]))
        return
    end = time.monotonic() + 60 * given.minutes
    reached = set(given.reached.read_text().split()) if given.reached else None
    known, originals = _ledger(given.ledger), {}
    chosen = drawn(given.count, given.seed)
    with copied() as copy, given.ledger.open("a") as ledger:
        for mutant in chosen:
            key = _key(dataclasses.asdict(mutant))
            if key in known or time.monotonic() >= end:
                continue
            if reached is not None and f"{mutant.file}:{mutant.line}" not in reached:
                line = {**dataclasses.asdict(mutant), "verdict": "not reached", "by": "", "programs": 0}
            else:
                for name in next(names for place, names in TARGETS.items() if mutant.file.startswith(place)):
                    if name not in originals:
                        shown = _run(copy, name, given.programs, 10 * given.seconds, None)
                        originals[name] = {origin: record[0] for origin, record in shown.items()}
                line = judged(mutant, copy, given.programs, given.seconds, originals)
            known[key] = line
            ledger.write(json.dumps(line) + "\n")
            ledger.flush()
    print(summary([known[key] for key in (_key(dataclasses.asdict(each)) for each in chosen) if key in known]))


if __name__ == "__main__":
    main()
