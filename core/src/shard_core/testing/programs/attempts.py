"""Goes on after what was refused: a refusal has to leave all as it was, hooks and what is on its way included."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.model import Model
from shard_core.testing.programs.parts import WRITING
from shard_core.testing.programs.situation import Situation

if TYPE_CHECKING:
    from shard_core.testing.programs.operations import Operation
    from shard_core.testing.programs.program import Program

_AT_MOST = 3
"""So many refusals a program goes on after."""
_TRIED: tuple[type[Any], ...] = (
    *(ops.Backward, ops.Closure, ops.Evaluate, ops.Forward, ops.ShowAverage),
    *(ops.ClipNorm, ops.ClipValue, ops.EditGradients, ops.ShowGradients, ops.Step),
    *(ops.EditWeights, ops.Initialize, ops.Load, ops.LoadStateDict, ops.LoadWeights, ops.ReloadOptimizer),
    ops.ShowParameters,
)
"""Operations that leave nothing behind once gradients are zeroed and generators seeded."""
_CALLING = _TRIED[:5]
"""Of these, those that call a model, which may have changed its buffers before it was refused."""


def after_refusal(program: Program, at: int) -> Program | None:
    """Return a program that tries what was refused, and goes on.

    Args:
        program: It was refused.
        at: At which operation; -1 for setup, and as many as there are for the end.

    Returns:
        The program; None where nobody knows how things stand after it.
    """
    attempts = sum(isinstance(each, ops.Attempt) for each in program.operations)
    refused = program.operations[at : at + 1] if at >= 0 else ()
    if attempts >= _AT_MOST or not refused or not _leaves_nothing(program, refused[0]):
        return None
    situation = Situation(program)
    operations: list[Operation] = []
    for number, drawn in enumerate(program.operations):
        operation = ops.Attempt(refused=drawn) if number == at else drawn
        # What needs the gradients that are gone is left out; a kept program may have begun with what is never drawn.
        if number <= at or situation.allows(operation):
            situation.follow(operation)
            operations.append(operation)
    return dataclasses.replace(program, operations=tuple(operations))


def _leaves_nothing(program: Program, operation: Operation) -> bool:
    """Check that an operation changes nothing that an attempt does not restore."""
    if not isinstance(operation, _TRIED) or (isinstance(operation, ops.Backward) and operation.how == "frozen"):
        return False
    return not isinstance(operation, _CALLING) or not any(_changes_by_calls(spec.parts) for spec in program.models)


@functools.lru_cache(maxsize=1000)
def _changes_by_calls(parts: tuple[str, ...]) -> bool:
    """Check whether a forward of a model changes its buffers or its weights."""
    if not set(WRITING).isdisjoint(parts):
        return True
    with torch.device("meta"):
        return next(Model(*parts).buffers(), None) is not None
