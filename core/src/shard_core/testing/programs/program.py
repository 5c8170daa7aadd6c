"""A training program as plain data, and its form in JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from shard_core.errors import InvalidOption
from shard_core.testing.programs.operations import Backward, Fail, Switch
from shard_core.testing.programs.settings import TAKES
from shard_core.testing.programs.writing.records import checked, operation_from, record_of

if TYPE_CHECKING:
    from shard_core.testing.programs.operations import Operation

MODULES = ("model", "critic")
OPTIMIZERS = ("optimizer", "second")
SCHEDULERS = ("scheduler", "second_scheduler")
STUBBORN = "stubborn"
"""What a program calls an object of its own that refuses to be loaded, where there is one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model: its parts, and what its forward returns."""

    parts: tuple[str, ...]
    output: str = "tensor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """An optimizer.

    Attributes:
        module: Whose parameters it steps.
        kind: One of ``settings.KINDS``, such as ``"sgd"``, or of ``settings.TAKES``.
        groups: 1, or 2: matrices, and the rest at another learning rate.
        maximize: Whether it goes uphill.
        foreach: Torch's keyword.
        fused: Torch's keyword, where it has one.
        weight_decay: Torch's keyword.
        scheduled: Whether it has a scheduler.
        without: The part of its module whose parameters it is made without, for ``AddGroup`` to add.
    """

    module: int = 0
    kind: str = "sgd"
    groups: int = 1
    maximize: bool = False
    foreach: bool | None = None
    fused: bool = False
    weight_decay: float = 0.0
    scheduled: bool = False
    without: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A training program.

    Attributes:
        seed: What it was drawn from, and what its weights are.
        strategy: The name of the strategy it begins under.
        device: The device type it computes on; ``""`` for the CPU, or else the one that its strategies have.
        world_size: How many ranks.
        precision: The name of the precision.
        models: Its models.
        optimizers: Its optimizers.
        late: Whether optimizers are made after setup.
        warmed: Whether a backward comes before its optimizer that is made late is set up, too.
        averaged: Whether the first model has an exponential moving average.
        apart: Whether each rank draws other weights for its models, so that setup has to give all those of rank 0.
        wrapped: Whether its models' parts are made units by hand, where a strategy has such.
        unlaunched: Whether its one rank was started without a launcher, as by ``python this_file.py``.
        begins: The call that sets the environment up, one of ``settings.BEGINNINGS``; ``""`` for its own.
        compiled: Where ``torch.compile`` comes in: ``""`` for nowhere, or one of ``settings.COMPILED``.
        options: Of the strategies that have them, from ``OPTIONS``, as they are written in Python.
        operations: What it does.
    """

    seed: int
    strategy: str
    device: str = ""
    world_size: int = 2
    precision: str = "32-true"
    models: tuple[ModelSpec, ...]
    optimizers: tuple[OptimizerSpec, ...]
    late: bool = False
    warmed: bool = False
    averaged: bool = False
    apart: bool = False
    wrapped: bool = False
    unlaunched: bool = False
    begins: str = ""
    compiled: str = ""
    options: tuple[str, ...] = ()
    operations: tuple[Operation, ...] = ()

    def to_json(self) -> str:
        """Write it as JSON, an operation a line."""
        record = dataclasses.asdict(self)
        operations = [json.dumps(record_of(each)) for each in self.operations]
        del record["operations"]
        text = json.dumps(record)
        return text[:-1] + ', "operations": [\n' + ",\n".join(operations) + "\n]}\n"


class Segment(NamedTuple):
    """What a program does on one number of ranks.

    Attributes:
        begin: The number of the switch that it begins with; -1 for setup.
        strategy: The strategy it begins under.
        world_size: How many ranks.
    """

    begin: int
    strategy: str
    world_size: int

    @property
    def entry(self) -> str:
        """Return the name of its function in the program's script."""
        return "main" if self.begin < 0 else f"main_{self.begin}"


def strategies_of(program: Program) -> set[str]:
    """Return the names of the strategies that a program begins and goes on under."""
    return {program.strategy} | {each.strategy for each in program.operations if isinstance(each, Switch)}


def segments(program: Program) -> list[Segment]:
    """List the segments of a program: it has one more than switches to another number of ranks."""
    switches = [
        Segment(number, each.strategy, each.world_size)
        for number, each in enumerate(program.operations)
        if isinstance(each, Switch) and each.world_size
    ]
    return [Segment(-1, program.strategy, program.world_size), *switches]


def first_backward(program: Program) -> Backward:
    """Return the backward that comes before an optimizer is set up, where one does."""
    return Backward(key=program.seed, rows=tuple(2 + rank % 2 for rank in range(program.world_size)), denominator=True)


def share_of(program: Program, spec: OptimizerSpec) -> int | str | None:
    """Return which parameters of its module an optimizer takes, as ``parameters_of`` does: None for all."""
    peers = [each for each in program.optimizers if each.module == spec.module]
    if len(peers) == 1:
        return None
    taken = next((TAKES[each.kind] for each in peers if each.kind in TAKES), None)
    if taken is None:
        return [each is spec for each in peers].index(True)  # two may be equal
    return taken if spec.kind in TAKES else "rest"


def optimizers_over(program: Program, module: int) -> list[int]:
    """List which optimizers step a module."""
    return [which for which, spec in enumerate(program.optimizers) if spec.module == module]


def everything(program: Program) -> list[str]:
    """List the names of all that a program builds, saves and loads."""
    schedulers = [name for name, spec in zip(SCHEDULERS, program.optimizers, strict=False) if spec.scheduled]
    average = ["average"] if program.averaged else []
    stubborn = any(isinstance(each, Fail) and each.how == "object" for each in program.operations)
    owners = [*MODULES[: len(program.models)], *OPTIMIZERS[: len(program.optimizers)], *schedulers, *average]
    return [*owners, *([STUBBORN] if stubborn else [])]


def from_json(text: str) -> Program:
    """Read a program that ``to_json`` wrote.

    Args:
        text: The JSON.

    Raises:
        InvalidOption: If it is none.
    """
    try:
        record: Any = json.loads(text)
    except ValueError as error:
        raise InvalidOption(f"a program is written as JSON, and this is none: {error}.") from error
    if not isinstance(record, dict):
        raise InvalidOption(f"a program is a JSON object, not {type(record).__name__}.")
    lists = {name: record.pop(name, []) for name in ("models", "optimizers", "operations")}
    if not all(isinstance(each, list) for each in lists.values()):
        raise InvalidOption("a program's models, optimizers and operations are lists.")
    plain: Program = checked(Program, {**record, "models": (), "optimizers": ()})
    return dataclasses.replace(
        plain,
        models=tuple(checked(ModelSpec, each) for each in lists["models"]),
        optimizers=tuple(checked(OptimizerSpec, each) for each in lists["optimizers"]),
        operations=tuple(operation_from(each) for each in lists["operations"]),
    )
