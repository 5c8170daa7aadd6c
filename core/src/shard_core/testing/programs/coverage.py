"""How much of what can be drawn a campaign has seen: pairs of operations, and operations on parts by setting."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

from shard_core.testing.programs.grammar import draw

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shard_core.testing.programs.operations import Operation
    from shard_core.testing.programs.program import Program

_DRAWN = 300
"""So many programs have every kind of operation, part and setting that can be drawn, as the grammar's tests hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """A part of a whole, counted.

    Attributes:
        seen: How many of them were seen.
        of: How many there are.
    """

    seen: int
    of: int

    @property
    def share(self) -> float:
        """Return the share as a number from 0 to 1."""
        return self.seen / self.of if self.of else 0.0


class Coverage:
    """Follows what the operations that were reached have covered.

    Args:
        strategy: Whose programs are counted.
        world_size: How many ranks they have.
        others: Strategies that they go on under.
        device: The device type that they compute on, as in ``Program``.
    """

    def __init__(self, strategy: str, world_size: int, others: tuple[str, ...], device: str = "") -> None:
        self._drawn_from = strategy, world_size, others, device
        self._pairs: set[tuple[str, str]] = set()
        self._cells: set[tuple[str, str, str]] = set()

    def add(self, program: Program, reached: int) -> None:
        """Count the first ``reached`` operations of a program: what came after them was never run."""
        operations = program.operations[:reached]
        kinds = [type(each).__name__ for each in operations]
        self._pairs.update(itertools.pairwise(kinds))
        for kind, operation in zip(kinds, operations, strict=True):
            self._cells.update(itertools.product([kind], _parts(program, operation), _settings(program)))

    @property
    def pairs(self) -> Share:
        """Return how many legal ordered pairs of operation kinds were seen side by side.

        Legal are all pairs of what the strategy's programs can have: no kind forbids another by itself. What stands
        between them is what else is pending, and some program always has nothing pending.
        """
        kinds = drawable(*self._drawn_from)[0].union(*self._pairs)
        return Share(seen=len(self._pairs), of=len(kinds) ** 2)

    @property
    def cells(self) -> Share:
        """Return how many triples were seen of an operation kind, a model part it was done to, and a setting."""
        axes = [known.union(seen) for known, seen in zip(drawable(*self._drawn_from), _axes(self._cells), strict=True)]
        return Share(seen=len(self._cells), of=math.prod(map(len, axes)))


@functools.lru_cache(maxsize=16)
def drawable(strategy: str, world_size: int, others: tuple[str, ...], device: str = "") -> tuple[frozenset[str], ...]:
    """Find out which operations, parts and settings a strategy's programs can have, by drawing some.

    Returns:
        The names of the kinds of operations, of the parts, and of the settings.
    """
    programs = [draw(seed, strategy, device=device, world_size=world_size, others=others) for seed in range(_DRAWN)]
    kinds = {type(each).__name__ for program in programs for each in program.operations}
    parts = {part for program in programs for model in program.models for part in model.parts}
    settings = {setting for program in programs for setting in _settings(program)}
    return frozenset(kinds), frozenset(parts), frozenset(settings)


def _axes(cells: set[tuple[str, str, str]]) -> list[set[str]]:
    """Return the kinds, the parts and the settings of some cells."""
    return [{cell[axis] for cell in cells} for axis in range(3)]


def _settings(program: Program) -> list[str]:
    """List a program's precision, its options, and whether its optimizers were made after setup."""
    return [program.precision, *program.options, *(["late"] if program.late else [])]


def _parts(program: Program, operation: Operation) -> Iterator[str]:
    """List the parts of the module that an operation is about; of all modules if it is about none in particular."""
    told: Any = operation
    number: int | None = getattr(told, "module", None)
    if hasattr(told, "of_module"):
        number = told.which if told.of_module else program.optimizers[told.which].module
    elif hasattr(told, "optimizer"):
        number = program.optimizers[told.optimizer].module
    for each, model in enumerate(program.models):
        if number in (None, each):
            yield from model.parts
