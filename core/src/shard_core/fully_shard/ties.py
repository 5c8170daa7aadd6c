"""Parameters that several submodules share, and groups of submodules that would part them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def groups_that_part(module: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> set[int]:
    """Find the groups that have to be dissolved so that every parameter has all its owners in one.

    A submodule belongs to the innermost group around it. What a dissolved group held goes to the group around it, or
    to none.

    Args:
        module: The whole module.
        groups: Some of its submodules; groups may lie inside one another.

    Returns:
        The positions of the groups to dissolve.
    """
    dissolved: set[int] = set()
    while parting := _parting(module, groups, dissolved):
        dissolved |= parting
    return dissolved


def _parting(module: nn.Module, groups: Sequence[Sequence[nn.Module]], dissolved: set[int]) -> set[int]:
    """Number the groups between the owners of one parameter and the innermost group around all of them."""
    numbers = {part: number for number, group in enumerate(groups) if number not in dissolved for part in group}
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
