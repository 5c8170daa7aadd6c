"""Small changes of what computes, drawn by seed.

Strings, annotations, logs, ``raise`` and what only refuses are never changed, nor files that no program comes to:
nothing computes there.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: What is mutated, and whose programs judge it.
TARGETS = {
    "core/src/shard_core/strategy": ("ddp", "fsdp", "deepspeed_stage_3", "tp"),
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
    "packages/shard-tp/src/shard_tp/dropout.py": "programs have no dropout between layers that ranks split",
}
_REFUSES = re.compile(r"_*(check|refuse|require|log)(_|$)")
"""The names of functions that change nothing, and are never mutated nor left out."""
_SYMMETRIC = ("max", "min")
"""Functions that give the same for two arguments in either order."""
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult
}  # fmt: skip


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
        said: The line as it stands there.
    """

    file: str
    operator: str
    line: int
    start: int
    end: int
    text: str
    said: str

    def applied(self) -> str:
        """Return the file with the change."""
        source = (ROOT / self.file).read_bytes()
        return (source[: self.start] + self.text.encode() + source[self.end :]).decode()

    @property
    def place(self) -> tuple[str, str, str]:
        """The file, its line as it stands there, and what replaces some of it: what moves with the code."""
        return self.file, self.said, self.text

    def diff(self) -> str:
        """Return the change as a diff without context."""
        before = (ROOT / self.file).read_text().splitlines()
        lines = difflib.unified_diff(before, self.applied().splitlines(), self.file, self.file, n=0, lineterm="")
        return "\n".join(list(lines)[2:])


def equivalent() -> dict[tuple[str, str, str], str]:
    """Read which mutants change nothing that a program could see, by their places, and why."""
    named = json.loads(Path(__file__).with_name("equivalent_mutants.json").read_text())
    return {(each["file"], each["line"], each["text"]): each["why"] for each in named}


def drawn(count: int, seed: int) -> list[Mutant]:
    """Draw mutants from all there are; a larger count begins with those of a smaller one.

    Each has a lot of its own, so that what is changed elsewhere leaves it drawn or not, and ledgers go on.
    """
    files = [file for place in TARGETS for file in _files(place) if str(file.relative_to(ROOT)) not in ELSEWHERE]
    lots: dict[tuple[str, ...], Mutant] = {}
    for mutant in (each for file in files for each in mutants_of(file)):
        lots.setdefault(mutant.place, mutant)  # what stands twice is judged once
    return sorted(lots.values(), key=lambda each: _lot(each, seed))[:count]


def _lot(mutant: Mutant, seed: int) -> bytes:
    return hashlib.sha256(f"{seed} {mutant.place}".encode()).digest()


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
            said = source[starts[node.lineno - 1] :].partition(b"\n")[0].decode().strip()
            place = {"line": node.lineno, "start": start, "end": end, "said": said}
            found.append(Mutant(file=name, operator=operator, text=text, **place))
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
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign():
            yield "deleted", "pass"
        case ast.Delete(targets=[ast.Attribute() | ast.Subscript()]):  # what has but a name was not needed
            yield "deleted", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "deleted", "pass"
        case ast.Return(value=ast.AST() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "returns None", "return None"
        case ast.Call(func=ast.Name(id=name), args=[_, _]) if name in _SYMMETRIC:
            return
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
