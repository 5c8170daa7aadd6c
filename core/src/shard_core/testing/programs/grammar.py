"""Draws random programs, and keeps them legal in plain PyTorch."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any, TypeVar

from shard_core import plugins
from shard_core.capability import Capability
from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.frame import draw_frame, possible
from shard_core.testing.programs.program import optimizers_over
from shard_core.testing.programs.settings import WHOLE, runs_alone, splits_layers
from shard_core.testing.programs.situation import MEANS, Situation
from shard_core.testing.programs.vocabulary import FLAGS, PREMATURE, VARIANTS, drawn_ways

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shard_core.plugins.info import StrategyInfo
    from shard_core.testing.programs.operations import Operation
    from shard_core.testing.programs.program import Program

_Way = TypeVar("_Way")
_SHORTEST, _LONGEST = 10, 22
_NEEDS = {
    ops.Closure: Capability.CLOSURE,
    ops.ClipValue: Capability.CLIP_VALUE,
}
"""What a strategy may lack; that it refuses then is a promise of its own."""
_ZEROED = 0.2
"""How many backwards there are whose gradients of before are zeroed after their forward."""
_VARIED = 0.5
"""How often something is drawn in another way, where there is one."""
_INTERRUPTED = 0.2
"""How often a backward past the strategy that an exception ends comes after a forward without one."""
_TAKES_NOTHING = 0.15
"""How often an object takes nothing of a checkpoint that is loaded."""
_PREMATURE = 0.5
"""How often what has to wait for a backward is tried before it."""
_ALONE = 0.25
"""How often a block that is not always called is by the first data rank alone."""
_OVERFLOWS = 0.05
"""How many steps are thrown away, since their gradients have no finite norm."""


def legal(program: Program) -> bool:
    """Check that a program's operations are allowed in their order, and name what it has."""
    counts = {"module": len(program.models), "optimizer": len(program.optimizers)}
    if not possible(program):
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


def draw(
    seed: int,
    strategy: str,
    *,
    device: str = "",
    world_size: int = 2,
    others: Sequence[str] = (),
    sizes: Sequence[int] = (),
) -> Program:
    """Draw a program.

    Args:
        seed: The same seed and strategy draw the same program.
        strategy: The name of the strategy it begins under.
        device: The device type it computes on, as in ``Program``.
        world_size: How many ranks.
        others: Strategies that it may go on under.
        sizes: Numbers of ranks that it may go on with.

    Returns:
        The program; legal.
    """
    chance = random.Random(f"{seed} {strategy} {world_size}")
    card = plugins.find(strategy)
    if device:  # what is drawn for strategies that have no other is what a CPU's oracle can follow there
        card = dataclasses.replace(card, devices=(device,))
    program = dataclasses.replace(draw_frame(seed, strategy, world_size, card, chance), device=device)
    if device:  # torch has a fused Adagrad on the CPU alone
        specs = [dataclasses.replace(each, fused=each.fused and each.kind != "adagrad") for each in program.optimizers]
        program = dataclasses.replace(program, optimizers=tuple(specs))
    names = [strategy, *(name for name in others if _can_go_on(program, plugins.find(name)))]
    situation = Situation(program)
    operations: list[Operation] = []
    length = chance.randint(_SHORTEST, _LONGEST)
    while len(operations) < length:
        now = dataclasses.replace(program, world_size=situation.world_size, strategy=situation.strategy)
        for proposed in _proposed(now, card, names, sizes, chance):
            operation = _varied(proposed, situation, random.Random(f"{seed} {len(operations)} varied"))
            if situation.allows(operation):
                situation.follow(operation)
                operations.append(operation)
            else:
                break
    for closing in _closing(program):
        if situation.allows(closing):
            situation.follow(closing)
            operations.append(closing)
    return dataclasses.replace(program, operations=tuple(operations))


def _closing(program: Program) -> Iterator[Operation]:
    """Yield what shows the gradients of the last backwards, and what comes of them."""
    yield from (ops.ShowGradients(module=number) for number in range(len(program.models)))
    yield from (ops.Step(optimizer=number) for number in range(len(program.optimizers)))


def _varied(operation: Operation, situation: Situation, chance: random.Random) -> Operation:
    """Return what some operations are drawn as instead: of chances of its own, so that seeds draw what they drew."""
    premature = PREMATURE.get(type(operation))
    if premature is not None and not situation.allows(operation):
        which = situation.optimizer_of(operation)
        failed = ops.Fail(how=premature, optimizer=which or 0)
        return failed if which is not None and chance.random() < _PREMATURE else operation
    ways = VARIANTS.get((type(operation), getattr(operation, "how", "")))
    if ways is not None and chance.random() < _VARIED:
        changes: Any = {"how": _one_of(ways, chance)}
        return dataclasses.replace(operation, **changes)
    if isinstance(operation, ops.Forward) and chance.random() < _INTERRUPTED:
        return dataclasses.replace(operation, how="interrupted by hand")
    if isinstance(operation, ops.Load) and chance.random() < _TAKES_NOTHING:
        return ops.Fail(how="object")
    flags = FLAGS.get(type(operation))
    if flags is not None and chance.random() < _VARIED:
        return dataclasses.replace(operation, **_one_of(flags, chance))
    return operation


def _one_of(ways: Sequence[_Way], chance: random.Random) -> _Way:
    """Return one of some ways, of one alone without a draw."""
    return ways[0] if len(ways) == 1 else chance.choice(ways)


def _can_go_on(program: Program, card: StrategyInfo) -> bool:
    """Check that a strategy has a program's precision, steps its optimizers, and takes its models if compiled."""
    if program.compiled and Capability.COMPILE not in card.capabilities:
        return False
    whole = any(spec.kind in WHOLE for spec in program.optimizers)
    return program.precision in card.precisions and not (whole and Capability.ANY_OPTIMIZER not in card.capabilities)


def _proposed(
    program: Program, card: StrategyInfo, names: Sequence[str], sizes: Sequence[int], chance: random.Random
) -> Iterable[Operation]:
    """Draw what might come next: mostly a piece of an ordinary step, often something odd."""
    number = chance.randrange(len(program.models))
    mine = optimizers_over(program, number)
    ordinary = chance.random() < 0.5
    if ordinary and program.seed % 5 == 0 and chance.random() < 0.2:  # two checkpoints, of which the second counts
        step = _ordinary(program, number, mine, card, chance)
        return [ops.Save(), *step, ops.Save(blocking=chance.random() < 0.6), ops.Load()]
    if ordinary:
        return _ordinary(program, number, mine, card, chance)
    name = chance.choice(names)
    same, blocking = name == program.strategy and chance.random() < 0.5, program.seed % 2 == 0
    switch = ops.Switch(strategy=name, same=same, blocking=blocking)
    resumed = ops.Switch(strategy=name, resumed=True)
    proposals = [*_odd(program, number, mine, card, chance), switch, *[resumed] * 2]
    proposals += [ops.Switch(strategy=name, world_size=chance.choice(sizes))] * 4 if sizes else []
    return [chance.choice(proposals)]


def _ordinary(
    program: Program, number: int, mine: Sequence[int], card: StrategyInfo, chance: random.Random
) -> list[Operation]:
    """Draw a part of the loop that everyone writes: a backward, or what ends a step."""
    if chance.random() < 0.6:
        return [_backward(program, number, card, chance)]
    if chance.random() < _OVERFLOWS:
        clipped = [ops.ClipNorm(optimizer=which, max_norm=1.0, fails=True) for which in mine]
        return [ops.EditGradients(module=number, how="infinite"), *clipped, ops.ZeroGrad(of_module=True, which=number)]
    found: list[Operation] = []
    if chance.random() < 0.4:
        bound = chance.choice([0.1, 1.0, 1e9])
        found += [
            ops.ClipNorm(optimizer=which, max_norm=bound, norm_type=chance.choice(_norms(card))) for which in mine
        ]
    skipped = chance.random() < 0.15
    found += [] if skipped else [ops.Step(optimizer=which) for which in mine]
    found += [ops.UpdateAverage()] if program.averaged and number == 0 else []
    found += [ops.StepScheduler(optimizer=which) for which in mine if program.optimizers[which].scheduled]
    if chance.random() < 0.85:
        none = chance.random() < (0.5 if skipped else 0.7)
        by_module = ops.ZeroGrad(of_module=True, which=number, set_to_none=none)
        by_optimizers = [ops.ZeroGrad(which=which, set_to_none=none) for which in mine]
        found += [by_module] if chance.random() < 0.4 else by_optimizers
    return found


def _norms(card: StrategyInfo) -> list[float]:
    """List the norms that a strategy clips by, the most used one more often."""
    return [2.0, 2.0, 1.0, float("inf")] if Capability.CLIP_ANY_NORM in card.capabilities else [2.0]


def _backward(program: Program, number: int, card: StrategyInfo, chance: random.Random) -> Operation:
    kinds = ["plain"] * 5 + ["accumulated"] * 2 + ["two_forwards", "crossed", "retain_graph", "gradient", "eval"]
    kinds += ["frozen"] * (chance.random() < 0.2) + ["penalty"] * (chance.random() < 0.4)
    kinds += ["by hand"] * (chance.random() < 0.08) + ["squares"] * (chance.random() < 0.4)
    kinds += ["method"] * (Capability.ENTRY_METHODS in card.capabilities)
    kinds += ["contrastive"] * (Capability.SYNC_GRADS in card.capabilities)
    kinds += ["through", "through", "detached", "detached"] * (len(program.models) == 2)
    how = chance.choice(kinds)
    number = 1 if how == "detached" else number
    often = 0.7 if program.seed % 3 == 0 else 0.15  # who gives denominators gives them to several backwards
    denominator = chance.random() < often and Capability.DENOMINATOR in card.capabilities and how not in MEANS
    rows = [chance.randint(2, 4)] * program.world_size
    if how != "contrastive" and chance.random() < (0.6 if denominator else 0.2):
        least = 2 if any("batch_norm" in model.parts for model in program.models) else 0 if denominator else 1
        rows = [chance.randint(least, 4) for _ in rows]
        rows[0] = max(rows[0], 1)
    key = chance.randrange(10**6)
    # Of a key, and not of what else is drawn: as most loops are written that have one optimizer.
    how = ("zeroed", "cleared")[key % 2] if how == "plain" and random.Random(key).random() < _ZEROED else how
    extra = "extra" in program.models[number].parts and chance.random() < 0.5
    alone = extra and runs_alone(program, how) and chance.random() < _ALONE
    return ops.Backward(
        module=number,
        key=key,
        rows=tuple(rows),
        how=how,
        denominator=denominator,
        deferred=how != "accumulated" and chance.random() < 0.25,
        extra=extra,
        alone=alone,
        unused=alone and random.Random(f"{key} unused").random() < _VARIED,
    )


def _odd(
    program: Program, number: int, mine: Sequence[int], card: StrategyInfo, chance: random.Random
) -> list[Operation]:
    """Draw one each of all operations but a switch, wherever they may stand."""
    which = chance.choice(list(mine) or range(len(program.optimizers)))
    key = chance.randrange(10**6)
    parts = [
        part for part in program.models[number].parts if part != "frozen" or Capability.UNFREEZE in card.capabilities
    ]
    forwards = [
        how for how in drawn_ways(ops.Forward) if how != "method" or Capability.ENTRY_METHODS in card.capabilities
    ]
    on_cpu = "cpu" in card.devices
    averaging: list[Operation] = [ops.UpdateAverage(), ops.ShowAverage(key=key)] * 7  # few programs have an average
    proposals: list[Operation] = [
        *(averaging if program.averaged else ()),
        _backward(program, number, card, chance),
        ops.Forward(module=number, key=key, how=chance.choice(forwards)),
        ops.Evaluate(module=number, key=key, samples=chance.randint(3, 9)),
        ops.ClipNorm(
            optimizer=which, max_norm=0.5, norm_type=chance.choice(_norms(card)), finite=chance.random() < 0.5
        ),
        ops.ClipValue(optimizer=which, value=chance.choice([0.01, 1.0])),
        ops.Step(optimizer=which),
        ops.Closure(optimizer=which, key=key, rows=(chance.randint(2, 4),) * program.world_size),
        chance.choice(
            [
                ops.ZeroGrad(of_module=True, which=number, set_to_none=chance.random() < 0.5),
                ops.ZeroGrad(which=which, set_to_none=chance.random() < 0.5),
            ]
        ),
        ops.ZeroByHand(module=number, set_to_none=chance.random() < 0.5),
        ops.EditGradients(
            module=number, how=chance.choices(drawn_ways(ops.EditGradients), (2, 1, not splits_layers(card), 1, 1))[0]
        ),
        ops.EditWeights(
            module=number,
            which=chance.randrange(50),
            how=chance.choice(drawn_ways(ops.EditWeights)),
            shown=chance.random() < 0.4,
        ),
        ops.ChangeLearningRate(optimizer=which, factor=chance.choice([0.5, 1.5])),
        *[ops.AddGroup(optimizer=which, rate=chance.choice([0.01, 0.1]), decay=chance.choice([0.0, 0.1]))] * 3,
        ops.StepScheduler(optimizer=which),
        ops.Freeze(module=number, part=chance.choice(parts or ["none"]), trained=chance.random() < 0.5),
        # Training a part that setup saw frozen is what fine-tuning does between two phases.
        *[ops.Freeze(module=number, part="frozen", trained=True)] * (4 if "frozen" in parts else 0),
        *[ops.HookGradients(module=number, part=chance.choice(program.models[number].parts))] * on_cpu,
        *[ops.Initialize(module=number, which=chance.randrange(50), shown=chance.random() < 0.4)] * on_cpu,
        ops.ShowWeights(),
        ops.ShowParameters(module=number),
        ops.ShowGradients(module=number),
        ops.LoadStateDict(module=number, shown=chance.random() < 0.4),
        ops.ReloadOptimizer(optimizer=which),
        ops.Reduce(key=key, how=chance.choice(drawn_ways(ops.Reduce))),
        ops.Seed(seed=chance.randrange(1000)),
        *[ops.Save(blocking=chance.random() < 0.6)] * 2,
        *[ops.Load(how=chance.choice(drawn_ways(ops.Load)))] * 6,
        ops.Fail(how=chance.choice(drawn_ways(ops.Fail))),
        ops.SavePretrained(module=number),
        *[ops.LoadWeights(module=number)] * 5,
    ]
    return [each for each in proposals if _NEEDS.get(type(each)) in (None, *card.capabilities)]
