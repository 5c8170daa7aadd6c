"""Draws random programs, and keeps them legal in plain PyTorch."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

from shard_core import plugins
from shard_core.capability import Capability
from shard_core.precision.policies import POLICIES
from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.parts import PARTS, SKIPPING
from shard_core.testing.programs.program import ModelSpec, OptimizerSpec, Program
from shard_core.testing.programs.settings import (
    ALL_AT_ONCE,
    APART,
    CAST,
    COMPILED,
    EXACT,
    FUSED,
    KINDS,
    MADE_WHOLE,
    NOT_COMPILED,
    OPTIONS,
    PRECISIONS,
    SPARSE,
    TAKES,
    WHOLE,
    offered,
    splits_layers,
)
from shard_core.testing.programs.situation import Situation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shard_core.plugins.info import StrategyInfo
    from shard_core.testing.programs.operations import Operation

_SHORTEST, _LONGEST = 10, 22
_NEEDS = {
    ops.Closure: Capability.CLOSURE,
    ops.ClipValue: Capability.CLIP_VALUE,
}
"""What a strategy may lack; that it refuses then is a promise of its own."""
_RARE = {"empty": 0.3, "sparse": 0.3, "hooked_parameter": 0.2}
"""How often a part is drawn, where less often than the others."""

_WRITTEN = {f"{name}={value}" for name, values in OPTIONS.items() for value in values}


def legal(program: Program) -> bool:
    """Check that a program's operations are allowed in their order, and name what it has."""
    counts = {"module": len(program.models), "optimizer": len(program.optimizers)}
    if not _possible(program):
        return False
    situation = Situation(program)
    for operation in program.operations:
        if any(getattr(operation, field, 0) >= count for field, count in counts.items()):
            return False
        if isinstance(operation, ops.ZeroGrad):
            owners: Sequence[object] = program.models if operation.of_module else program.optimizers
            if operation.which >= len(owners):
                return False
        if not situation.allows(operation):
            return False
        situation.follow(operation)
    return True


def _possible(program: Program) -> bool:
    """Check a program's options, models and optimizers."""
    if any(option not in _WRITTEN for option in program.options) or program.precision not in PRECISIONS:
        return False
    if not program.models or any(spec.module >= len(program.models) for spec in program.optimizers):
        return False
    if not _shared_as_taken(program):
        return False
    if program.compiled and not _may_be_compiled(program):
        return False
    if not all(_may_be_sparse(program, spec) for spec in program.optimizers if _is_sparse(program, spec)):
        return False
    return all(_may_lack(program, spec, spec.without) for spec in program.optimizers if spec.without)


def _shared_as_taken(program: Program) -> bool:
    """Check that an optimizer that takes some parameters only is one of two, and has no keyword that torch's lacks."""
    for spec in program.optimizers:
        peers = [each.kind for each in program.optimizers if each.module == spec.module]
        if spec.kind in TAKES and (len(peers) != 2 or peers.count(spec.kind) != 1 or spec.groups != 1):
            return False
        if spec.kind in TAKES and (spec.maximize or spec.fused or spec.foreach is not None):
            return False
    return True


def _is_sparse(program: Program, spec: OptimizerSpec) -> bool:
    """Check whether some gradients of an optimizer's module are sparse."""
    return "sparse" in program.models[spec.module].parts


def _may_be_sparse(program: Program, spec: OptimizerSpec) -> bool:
    """Check that torch steps sparse gradients by an optimizer."""
    plain = not spec.fused and not spec.weight_decay and spec.without != "sparse"
    return spec.kind in SPARSE and plain and not POLICIES[program.precision].scaled


def _may_be_compiled(program: Program) -> bool:
    """Check that torch's compiler gets all of a program right."""
    return program.compiled in COMPILED and not any(
        part in NOT_COMPILED for spec in program.models for part in spec.parts
    )


def _may_lack(program: Program, spec: OptimizerSpec, part: str) -> bool:
    """Check that an optimizer may be made without a part of its module, which no other optimizer shares."""
    alone = [each.module for each in program.optimizers].count(spec.module) == 1
    # Torch 2.9's Adagrad has no state for a group that it was not made with.
    alone = alone and not POLICIES[program.precision].scaled
    alone = alone and part != "sparse"  # an added group has weight decay
    return alone and spec.kind != "adagrad" and part in program.models[spec.module].parts


def draw(
    seed: int, strategy: str, *, world_size: int = 2, others: Sequence[str] = (), sizes: Sequence[int] = ()
) -> Program:
    """Draw a program.

    Args:
        seed: The same seed and strategy draw the same program.
        strategy: The name of the strategy it begins under.
        world_size: How many ranks.
        others: Strategies that it may go on under.
        sizes: Numbers of ranks that it may go on with.

    Returns:
        The program; legal.
    """
    chance = random.Random(f"{seed} {strategy} {world_size}")
    card = plugins.find(strategy)
    program = _frame(seed, strategy, world_size, card, chance)
    others = [name for name in others if _can_go_on(program, plugins.find(name))]
    situation = Situation(program)
    operations: list[Operation] = []
    length = chance.randint(_SHORTEST, _LONGEST)
    while len(operations) < length:
        now = dataclasses.replace(program, world_size=situation.world_size)
        for operation in _proposed(now, card, others, sizes, chance):
            if situation.allows(operation):
                situation.follow(operation)
                operations.append(operation)
            else:
                break
    return dataclasses.replace(program, operations=tuple(operations))


def _can_go_on(program: Program, card: StrategyInfo) -> bool:
    """Check that a strategy has a program's precision, steps its optimizers, and takes its models if compiled."""
    if program.compiled and Capability.COMPILE not in card.capabilities:
        return False
    whole = any(spec.kind in WHOLE for spec in program.optimizers)
    return program.precision in card.precisions and not (whole and Capability.ANY_OPTIMIZER not in card.capabilities)


def _frame(seed: int, strategy: str, world_size: int, card: StrategyInfo, chance: random.Random) -> Program:
    """Draw everything but the operations."""
    own_kernels = "cpu" not in card.devices
    own_masks = splits_layers(card) or own_kernels  # of a plan's styles, or of the device's own generator
    known = [part for part in PARTS if not (own_masks and part == "dropout")]
    several = chance.random() < 0.15 and Capability.SEVERAL_MODULES in card.capabilities
    models = []
    for _ in range(1 + several):
        weights = [_RARE.get(part, 1.0) for part in known]
        parts = tuple(dict.fromkeys(chance.choices(known, weights, k=chance.randint(2, 5))))
        models.append(ModelSpec(parts=parts, output=chance.choice(["tensor", "tuple", "dict"])))
    two = several or (chance.random() < 0.2 and Capability.MULTIPLE_OPTIMIZERS in card.capabilities)
    # Torch's Adafactor divides by the number of elements.
    divides = not any("empty" in model.parts for model in models) and Capability.ANY_OPTIMIZER in card.capabilities
    kinds = [kind for kind in KINDS if kind not in WHOLE or divides]
    optimizers = [
        OptimizerSpec(
            module=number if several else 0,
            kind=chance.choice(kinds),
            groups=chance.choice([1, 1, 2]),
            maximize=chance.random() < 0.1,
            foreach=chance.choice([None, None, True, False]),
            weight_decay=chance.choice([0.0, 0.05]),
            scheduled=chance.random() < 0.4,
        )
        for number in range(1 + two)
    ]
    precision = _precision(card, chance)
    if precision in CAST and any(spec.kind in MADE_WHOLE for spec in optimizers):
        precision = "32-true"
    optimizers = [_fused(spec, models[spec.module], precision, chance) for spec in optimizers]
    if any("sparse" in model.parts for model in models):
        precision = "32-true" if POLICIES[precision].scaled else precision
        kinds = [kind for kind in SPARSE if precision not in CAST or kind not in MADE_WHOLE]
        changes: dict[str, Any] = {"kind": chance.choice(kinds), "fused": False, "weight_decay": 0.0}
        optimizers = [dataclasses.replace(spec, **changes) for spec in optimizers]
    late = chance.random() < 0.2
    if late and own_kernels:
        optimizers = [dataclasses.replace(spec, fused=False) for spec in optimizers]
    drawn = Program(
        seed=seed,
        strategy=strategy,
        world_size=world_size,
        precision=precision,
        models=tuple(models),
        optimizers=tuple(optimizers),
        late=late,
        averaged=chance.random() < 0.08 and precision in EXACT,
        options=_options(offered(strategy), chance),
    )
    drawn = _compiled(drawn, card, chance)
    if two and not several and divides and not any(_is_sparse(drawn, spec) for spec in optimizers):
        drawn = _taking(drawn, chance)
    lacking = tuple(_lacking(drawn, spec, chance) for spec in drawn.optimizers)
    return dataclasses.replace(drawn, optimizers=lacking)


def _compiled(program: Program, card: StrategyInfo, chance: random.Random) -> Program:
    """Return a program that may be compiled; rarely, for that takes seconds."""
    compiled = dataclasses.replace(program, compiled=chance.choice(COMPILED))
    rare = chance.random() < 0.02 and Capability.COMPILE in card.capabilities
    return compiled if rare and _may_be_compiled(compiled) else program


def _taking(program: Program, chance: random.Random) -> Program:
    """Return a program of two optimizers over one model, the first of which may take some parameters only."""
    if chance.random() < 0.8:
        return program
    first, second = program.optimizers
    plain: dict[str, Any] = {"groups": 1, "maximize": False, "foreach": None, "fused": False}
    first = dataclasses.replace(first, kind=chance.choice(list(TAKES)), **plain)
    return dataclasses.replace(program, optimizers=(first, second))


def _precision(card: StrategyInfo, chance: random.Random) -> str:
    """Draw a precision; mostly float32, where bounds are narrow and most programs are meant to be."""
    known = [name for name in PRECISIONS if name in card.precisions and "cpu" in card.devices]
    return chance.choice(known or ["32-true"]) if chance.random() < 0.3 else "32-true"


def _fused(spec: OptimizerSpec, model: ModelSpec, precision: str, chance: random.Random) -> OptimizerSpec:
    """Return an optimizer that may step in one fused kernel, which excludes ``foreach``."""
    wrong = precision == "bf16-true" and spec.kind in ("sgd", "momentum", "nesterov")
    wrong = wrong or (spec.kind in ALL_AT_ONCE and not set(SKIPPING).isdisjoint(model.parts))
    fused = spec.kind in FUSED and not spec.foreach and chance.random() < 0.2 and not wrong
    return dataclasses.replace(spec, fused=fused)


def _lacking(program: Program, spec: OptimizerSpec, chance: random.Random) -> OptimizerSpec:
    """Return an optimizer that may be made without a part."""
    part = chance.choice(program.models[spec.module].parts)
    lacks = chance.random() < 0.35 and _may_lack(program, spec, part)
    return dataclasses.replace(spec, without=part) if lacks else spec


def _options(offers: Sequence[str], chance: random.Random) -> tuple[str, ...]:
    """Draw up to three options, each with one value; mostly none."""
    if chance.random() < 0.6:
        return ()
    drawn = chance.sample(offers, min(len(offers), chance.randint(1, 3)))
    if set(drawn) >= APART:
        drawn = [option for option in drawn if option not in APART]
    return tuple({option.partition("=")[0]: option for option in drawn}.values())


def _proposed(
    program: Program, card: StrategyInfo, others: Sequence[str], sizes: Sequence[int], chance: random.Random
) -> Iterable[Operation]:
    """Draw what might come next: mostly a piece of an ordinary step, often something odd."""
    number = chance.randrange(len(program.models))
    mine = [which for which, spec in enumerate(program.optimizers) if spec.module == number]
    if chance.random() < 0.55:
        return _ordinary(program, number, mine, card, chance)
    switch = ops.Switch(strategy=chance.choice([program.strategy, *others]))
    proposals = [*_odd(program, number, mine, card, chance), switch]
    proposals += [dataclasses.replace(switch, world_size=chance.choice(sizes))] * 4 if sizes else []
    return [chance.choice(proposals)]


def _ordinary(
    program: Program, number: int, mine: Sequence[int], card: StrategyInfo, chance: random.Random
) -> list[Operation]:
    """Draw a part of the loop that everyone writes: a backward, or what ends a step."""
    if chance.random() < 0.6:
        return [_backward(program, number, card, chance)]
    found: list[Operation] = []
    if chance.random() < 0.4:
        norm_types = [2.0, 2.0, 1.0, float("inf")] if Capability.CLIP_ANY_NORM in card.capabilities else [2.0]
        bound = chance.choice([0.1, 1.0, 1e9])
        found += [ops.ClipNorm(optimizer=which, max_norm=bound, norm_type=chance.choice(norm_types)) for which in mine]
    skipped = chance.random() < 0.1
    found += [] if skipped else [ops.Step(optimizer=which) for which in mine]
    found += [ops.UpdateAverage()] if program.averaged and number == 0 else []
    found += [ops.StepScheduler(optimizer=which) for which in mine if program.optimizers[which].scheduled]
    if chance.random() < 0.85:
        none = chance.random() < 0.7
        by_module = ops.ZeroGrad(of_module=True, which=number, set_to_none=none)
        by_optimizers = [ops.ZeroGrad(which=which, set_to_none=none) for which in mine]
        found += [by_module] if chance.random() < 0.4 else by_optimizers
    return found


def _backward(program: Program, number: int, card: StrategyInfo, chance: random.Random) -> Operation:
    kinds = ["plain"] * 5 + ["two_forwards", "crossed", "retain_graph", "gradient"]
    kinds += ["method"] * (Capability.ENTRY_METHODS in card.capabilities)
    kinds += ["contrastive"] * (Capability.SYNC_GRADS in card.capabilities)
    kinds += ["through"] * 2 * (len(program.models) == 2)
    how = chance.choice(kinds)
    denominator = chance.random() < 0.3 and Capability.DENOMINATOR in card.capabilities and how != "contrastive"
    rows = [chance.randint(2, 4)] * program.world_size
    if denominator and chance.random() < 0.6:
        least = 2 if any("batch_norm" in model.parts for model in program.models) else 0
        rows = [chance.randint(least, 4) for _ in rows]
        rows[0] = max(rows[0], 1)
    key = chance.randrange(10**6)
    return ops.Backward(
        module=number,
        key=key,
        rows=tuple(rows),
        how=how,
        denominator=denominator,
        deferred=chance.random() < 0.25,
        extra="extra" in program.models[number].parts and chance.random() < 0.5,
    )


def _odd(
    program: Program, number: int, mine: Sequence[int], card: StrategyInfo, chance: random.Random
) -> list[Operation]:
    """Draw one each of all operations but a switch, wherever they may stand."""
    which = chance.choice(list(mine))
    key = chance.randrange(10**6)
    parts = [
        part for part in program.models[number].parts if part != "frozen" or Capability.UNFREEZE in card.capabilities
    ]
    averaging: list[Operation] = [ops.UpdateAverage(), ops.ShowAverage(key=key)] * 4  # few programs have an average
    proposals: list[Operation] = [
        *(averaging if program.averaged else ()),
        _backward(program, number, card, chance),
        ops.Forward(module=number, key=key, how=chance.choice(ops.WAYS[ops.Forward])),
        ops.Evaluate(module=number, key=key, samples=chance.randint(3, 9)),
        ops.ClipNorm(optimizer=which, max_norm=0.5),
        ops.ClipValue(optimizer=which, value=chance.choice([0.01, 1.0])),
        ops.Step(optimizer=which),
        ops.Closure(optimizer=which, key=key, rows=(chance.randint(2, 4),) * program.world_size),
        ops.ZeroGrad(of_module=chance.random() < 0.5, which=number, set_to_none=chance.random() < 0.5),
        ops.ZeroByHand(module=number, set_to_none=chance.random() < 0.5),
        ops.EditGradients(module=number),
        ops.EditWeights(module=number, which=chance.randrange(50)),
        ops.ChangeLearningRate(optimizer=which, factor=chance.choice([0.5, 1.5])),
        *[ops.AddGroup(optimizer=which, rate=chance.choice([0.01, 0.1]), decay=chance.choice([0.0, 0.1]))] * 3,
        ops.StepScheduler(optimizer=which),
        ops.Freeze(module=number, part=chance.choice(parts or ["none"]), trained=chance.random() < 0.5),
        ops.ShowWeights(),
        ops.ShowParameters(module=number),
        ops.ShowGradients(module=number),
        ops.LoadStateDict(module=number),
        ops.ReloadOptimizer(optimizer=which),
        ops.Reduce(key=key, how=chance.choice(ops.WAYS[ops.Reduce])),
        ops.Seed(seed=chance.randrange(1000)),
        ops.Save(blocking=chance.random() < 0.6),
        ops.Load(),
        ops.Load(),
    ]
    return [each for each in proposals if _NEEDS.get(type(each)) in (None, *card.capabilities)]
