"""Parameters that several submodules share, and the units that must not part them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from shard_core.units import Unit


def without_ties(module: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Dissolve the units that would part a shared parameter from its other owners.

    Sharding replaces a parameter unit by unit, so one that is shared across units would become several without a
    word. What a dissolved unit held goes to the unit around it, or to the root.

    Args:
        module: The whole module.
        units: Its units; they may lie inside one another.

    Returns:
        The units that are left, in the same order.
    """
    left = list(units)
    while parting := _parting(module, left):
        left = [unit for number, unit in enumerate(left) if number not in parting]
    return left


def _parting(module: nn.Module, units: Sequence[Unit]) -> set[int]:
    """Number the units between the owners of one parameter and the innermost unit around all of them."""
    numbers = {part: number for number, unit in enumerate(units) for part in unit.modules}
    stacks: dict[int, set[tuple[int, ...]]] = {}
    seen: set[tuple[nn.Module, tuple[int, ...]]] = set()

    def walk(part: nn.Module, around: tuple[int, ...]) -> None:
        stack = (*around, numbers[part]) if part in numbers else around
        if (part, stack) in seen:
            return
        seen.add((part, stack))
        for parameter in part.parameters(recurse=False):
            stacks.setdefault(id(parameter), set()).add(stack)
        for child in part.children():
            walk(child, stack)

    walk(module, ())
    parting: set[int] = set()
    for each in stacks.values():
        if len({stack[-1:] for stack in each}) > 1:
            shared = sum(len(set(steps)) == 1 for steps in zip(*each, strict=False))
            parting |= {number for stack in each for number in stack[shared:]}
    return parting
