"""Which submodules share one message: units of a sharded module, formed by bytes, none of them parting a tie."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shard_core.errors import SetupError
from shard_core.parameters import plain_module_name, plain_name
from shard_core.preparation.submodules import num_bytes, runs_of_blocks

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)
_parts: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[FSDPModule]]] = weakref.WeakKeyDictionary()
"""Asked several times in a step, of modules with hundreds of submodules."""


def sharded_parts(module: nn.Module) -> list[FSDPModule]:
    """List the parts of a module that torch gathers by themselves, which ``fully_shard`` has made of units."""
    # Torch's compiler would trace the cache, find nothing there, and put the parts themselves in place of references.
    known = None if torch.compiler.is_compiling() else _parts.get(module)
    if known is None:
        parts: list[FSDPModule] = [part for part in module.modules() if isinstance(part, FSDPModule)]
        if torch.compiler.is_compiling() or not isinstance(module, FSDPModule):  # the last to be sharded
            return parts
        known = _parts[module] = [weakref.ref(part) for part in parts]
    return [part for each in known if (part := each()) is not None]


@dataclasses.dataclass(frozen=True)
class Unit:
    """Submodules whose parameters are gathered and reduced in one message.

    Attributes:
        names: The submodules' names, in the order they run.
        modules: The submodules.
        num_bytes: The size of their parameters.
    """

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    num_bytes: int

    @classmethod
    def of(cls, blocks: Iterable[tuple[str, nn.Module]]) -> Unit:
        """Build a unit of named submodules.

        Args:
            blocks: Names and submodules.
        """
        names, modules = zip(*blocks, strict=True)
        return cls(names, modules, num_bytes(*modules))


def find_units(module: nn.Module, unit_bytes: int) -> list[Unit]:
    """Group a module's repeated blocks into units of at least ``unit_bytes``.

    Blocks are the outermost runs of siblings of one class: the layers of a transformer, the stages
    of an MLP. Neighbours join one unit until it weighs enough, so that small blocks do not each pay
    for a message of their own. What is left, and what shares a parameter with something outside
    its unit, belongs to the root.

    Args:
        module: The whole module.
        unit_bytes: How much a message should carry.

    Returns:
        The units in the order their blocks are registered, without the root's; empty if the whole
        module weighs less than two units.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(*[nn.Linear(10, 10, bias=False) for _ in range(4)])
        >>> [unit.names for unit in find_units(model, unit_bytes=800)]
        [('0', '1'), ('2', '3')]
        >>> find_units(model, unit_bytes=2000)
        []
    """
    if num_bytes(module) < 2 * unit_bytes:
        return []
    units: list[Unit] = []
    for run in runs_of_blocks(module):
        units.extend(_grouped(run, unit_bytes))
    return _without_ties(module, units)


def unit_sizes(module: nn.Module, unit_bytes: int) -> list[int]:
    """List sizes of units that divide a module in different ways.

    Args:
        module: The whole module.
        unit_bytes: The first of them.

    Returns:
        Values for ``find_units``: the given one, and those among one unit per block, larger ones, quarters of the
        module and a single unit that come to something else.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(*[nn.Linear(10, 10, bias=False) for _ in range(8)])
        >>> [len(find_units(model, size)) for size in unit_sizes(model, 10_000)]
        [0, 8, 4]
    """
    whole = num_bytes(module)
    found: dict[tuple[tuple[str, ...], ...], int] = {}
    for size in (unit_bytes, 1, 4 * unit_bytes, whole // 4, whole):
        found.setdefault(tuple(unit.names for unit in find_units(module, max(size, 1))), size)
    return list(found.values())


def with_chosen(module: nn.Module, chosen: Collection[nn.Module], units: Sequence[Unit] = ()) -> list[Unit]:
    """Build a unit of each of some submodules, besides and inside other units.

    Args:
        module: The whole module.
        chosen: Submodules that are to be units of their own; those without parameters, and the module itself,
            need none.
        units: The others.

    Returns:
        All units, inner ones before those around them, none that parts a shared parameter.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> [unit.names for unit in with_chosen(model, [model[1], model[1][0], model[1][1]])]
        [('1.0',), ('1',)]
    """
    order = {part: position for position, part in enumerate(_inner_first(module))}
    names = {part: plain_module_name(name) for name, part in module.named_modules()}
    own = [Unit.of([(names[part], part)]) for part in chosen if part is not module and num_bytes(part)]
    rest = [[pair for pair in zip(unit.names, unit.modules, strict=True) if pair[1] not in chosen] for unit in units]
    found = [*own, *(Unit.of(blocks) for blocks in rest if blocks)]
    return _without_ties(module, sorted(found, key=lambda unit: max(order[part] for part in unit.modules)))


def _inner_first(module: nn.Module) -> list[nn.Module]:
    """List a module and what is in it, each after what is in it, in the order of registration."""
    found: dict[nn.Module, None] = {}

    def visit(part: nn.Module) -> None:
        for child in part.children():
            if child not in found:
                visit(child)
        found[part] = None

    visit(module)
    return list(found)


def _grouped(run: Sequence[tuple[str, nn.Module]], unit_bytes: int) -> list[Unit]:
    groups: list[list[tuple[str, nn.Module]]] = [[]]
    for block in run:
        if groups[-1] and num_bytes(*(child for _, child in groups[-1])) >= unit_bytes:
            groups.append([])
        groups[-1].append(block)
    # A last group that is too light would pay for a message of its own; its neighbour takes it in.
    if len(groups) > 1 and num_bytes(*(child for _, child in groups[-1])) < unit_bytes // 2:
        tail = groups.pop()
        groups[-1].extend(tail)
    return [Unit.of(group) for group in groups]


def _without_ties(module: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Drop the units that would part a shared parameter: sharded in two places it would become two, silently."""
    dissolved = groups_that_part(module, [unit.modules for unit in units])
    return [unit for number, unit in enumerate(units) if number not in dissolved]


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
    """Find the groups between the owners of one parameter and the innermost group around all of them."""
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


def kept_whole(module: nn.Module, units: Sequence[Unit], asked: Collection[str]) -> set[str]:
    """List the parameters that every rank keeps whole, as torch shards either complex or real ones of a unit.

    Args:
        module: The whole module.
        units: Its units, inner ones before those around them, without the root's.
        asked: Names of parameters that are to be kept whole anyhow.

    Returns:
        Those names, and of every unit that has both kinds the names of that without shards of tensor parallelism; if
        neither has, or both, of the kind that takes less memory.

    Raises:
        SetupError: If both kinds of a unit have shards already.

    Example:
        >>> from torch import nn
        >>> module = nn.ParameterDict({"real": torch.zeros(8), "complex": torch.zeros(3, dtype=torch.cfloat)})
        >>> kept_whole(module, [], asked=())
        {'complex'}
    """
    rest = {p: plain_name(name) for name, p in module.named_parameters() if p.dim() and p.numel()}
    found: set[str] = set()
    for modules in (*(unit.modules for unit in units), (module,)):
        kinds: dict[bool, list[tuple[bool, int, str]]] = {True: [], False: []}
        for parameter in itertools.chain.from_iterable(part.parameters() for part in modules):
            name = rest.pop(parameter, None)
            if name is not None and name not in asked:
                kinds[parameter.is_complex()].append((isinstance(parameter, DTensor), parameter.nbytes, name))
        fewer = min(
            kinds.values(), key=lambda kind: (any(split for split, *_ in kind), sum(size for _, size, _ in kind))
        )
        shard = next((name for split, _, name in fewer if split), None)
        if shard is not None:
            raise SetupError(
                f"{shard!r} and another parameter of its unit are split over tensor-parallel ranks, and one is complex "
                "and the other real, which torch does not shard together; leave one of both out of the plan."
            )
        found.update(name for *_, name in fewer)
    if found:
        log.info("kept whole on every rank, as their units hold real and complex parameters: %s", sorted(found))
    return found.union(asked)


def log_units(module: nn.Module, units: Sequence[Unit], mesh: DeviceMesh) -> None:
    """Log the units and their sizes.

    Args:
        module: The whole module, sharded.
        units: Its units, inner ones before those around them.
        mesh: The data-parallel ranks.
    """
    total, logged = num_bytes(module), 0
    for number, unit in enumerate(units):
        # A unit does not hold what units inside it hold.
        upto = num_bytes(*(part for each in units[: number + 1] for part in each.modules))
        log.info("unit %s: %.1f MiB", ", ".join(unit.names), (upto - logged) / 2**20)
        logged = upto
    ranks = " x ".join(map(str, mesh.shape))
    log.info("root unit: %.1f of %.1f MiB, over %s ranks", (total - logged) / 2**20, total / 2**20, ranks)
