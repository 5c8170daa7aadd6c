"""Shrinks a program that fails to a shorter one that fails for the same reason."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import TYPE_CHECKING, Any

from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.grammar import legal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shard_core.testing.programs.judgement import Judgement
    from shard_core.testing.programs.program import Program

#: What an optimizer needs least of.
_PLAIN: dict[str, Any] = {
    "groups": 1,
    "maximize": False,
    "foreach": None,
    "fused": False,
    "weight_decay": 0.0,
    "scheduled": False,
    "without": "",
    "kind": "sgd",
}
#: What a program sets up.
_PLAIN_FRAME: dict[str, Any] = {
    "begins": "", "warmed": False, "late": False, "apart": False, "wrapped": False, "averaged": False,
    "unlaunched": False,
}  # fmt: skip
#: What a backward does.
_PLAIN_BACKWARD: dict[str, Any] = {
    "how": "plain",
    "denominator": False,
    "deferred": False,
    "extra": False,
    "alone": False,
    "unused": False,
}


def shrink(
    program: Program, found: Judgement, judge: Callable[[Program], Judgement], *, seconds: float = 60.0
) -> tuple[Program, Judgement]:
    """Leave out whatever a failure does not need: operations by halves and one by one, parts, optimizers, options.

    Args:
        program: It failed.
        found: How.
        judge: Judges a program.
        seconds: When to stop trying.

    Returns:
        The smallest program that was found to fail with the same symptom, and how it failed.
    """
    end = time.monotonic() + seconds
    best, judged = program, found
    reached = dataclasses.replace(program, operations=program.operations[: max(found.at, 0) + 1])
    candidates = itertools.chain([reached], _smaller(program))
    while True:
        for candidate in candidates:
            if time.monotonic() > end:
                return best, judged
            verdict = judge(candidate) if legal(candidate) else None
            if verdict and (verdict.verdict, verdict.symptom) == (found.verdict, found.symptom):
                best, judged = candidate, verdict
                break
        else:
            return best, judged
        candidates = itertools.chain(_smaller(best))


def _smaller(program: Program) -> Iterator[Program]:
    """List what is one cut smaller, the largest cuts first."""
    if program.compiled:  # first: it makes all other candidates faster
        yield dataclasses.replace(program, compiled="")
    size = max(1, len(program.operations) // 2)
    while size:
        for begin in range(0, len(program.operations), size):
            rest = program.operations[:begin] + program.operations[begin + size :]
            if rest != program.operations:
                yield dataclasses.replace(program, operations=rest)
        size //= 2
    if len(program.models) > 1:
        yield dataclasses.replace(
            program, models=program.models[:1], optimizers=tuple(each for each in program.optimizers if not each.module)
        )
    elif len(program.optimizers) > 1:
        yield dataclasses.replace(program, optimizers=program.optimizers[:1])
        yield dataclasses.replace(program, optimizers=program.optimizers[1:])
    for number, model in enumerate(program.models):
        for part in model.parts:
            yield _with_model(program, number, parts=tuple(each for each in model.parts if each != part))
        if model.output != "tensor":
            yield _with_model(program, number, output="tensor")
    yield from _plainer(program)


def _plainer(program: Program) -> Iterator[Program]:
    """List what has one option less, of the strategy, an optimizer or a backward."""
    if program.precision != "32-true":
        yield dataclasses.replace(program, precision="32-true")
    for option in program.options:
        yield dataclasses.replace(program, options=tuple(each for each in program.options if each != option))
    for field, value in _PLAIN_FRAME.items():
        if getattr(program, field) != value:
            yield dataclasses.replace(program, **{field: value})
    for number, spec in enumerate(program.optimizers):
        for field, value in _PLAIN.items():
            if getattr(spec, field) != value:
                optimizers = list(program.optimizers)
                optimizers[number] = dataclasses.replace(spec, **{field: value})
                yield dataclasses.replace(program, optimizers=tuple(optimizers))
    for place, operation in enumerate(program.operations):
        for field, plain in _PLAIN_BACKWARD.items() if isinstance(operation, ops.Backward) else ():
            if getattr(operation, field) != plain:
                operations = list(program.operations)
                operations[place] = dataclasses.replace(operation, **{field: plain})
                yield dataclasses.replace(program, operations=tuple(operations))


def _with_model(program: Program, number: int, **changes: Any) -> Program:
    models = list(program.models)
    models[number] = dataclasses.replace(models[number], **changes)
    return dataclasses.replace(program, models=tuple(models))
