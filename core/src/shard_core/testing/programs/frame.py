"""Draws what a random program trains with, models, optimizers and options, and knows what of it goes together."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import TYPE_CHECKING, Any

import torch

from shard_core.capability import Capability
from shard_core.precision.policies import POLICIES
from shard_core.testing.programs.model import Model
from shard_core.testing.programs.parts import COMPLEX, PARTS, SKIPPING, WRITING
from shard_core.testing.programs.program import ModelSpec, OptimizerSpec, Program
from shard_core.testing.programs.settings import (
    ALL_AT_ONCE,
    APART,
    BEGINNINGS,
    CAST,
    COMPILED,
    EXACT,
    FUSED,
    GIVEN,
    KINDS,
    MADE_WHOLE,
    NOT_COMPILED,
    NOT_COMPLEX,
    OPTIONS,
    PRECISIONS,
    REAL_ALONE,
    SPARSE,
    SQUARE,
    TAKES,
    WHOLE,
    agreeing,
    is_made_before,
    offered,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shard_core.plugins.info import StrategyInfo

_RARE = {
    **{"empty": 0.3, "sparse": 0.3, "weighed": 0.6},
    **{"transposed": 0.0, "narrow": 0.0, "reassigned": 0.0, "turned": 0.0},
}
"""How often a part is drawn, where less often than the others."""
_UNLAUNCHED = 0.5
"""How many programs of one rank are started without a launcher: by chances of their own."""
_WARMED = 0.3
"""How many optimizers that are made late are so after a backward."""
_BEGINS = 0.1
"""How often a collective sets the environment up."""
_ADDED, _OFTEN = {"added": "transposed", "narrowed": "narrow", "assigned": "reassigned"}, 0.08
"""What is added to parts, and how often: by chances of its own, so that seeds go on drawing what they have drawn."""
_ALONE = 0.5
"""How often parts of which each is a unit by itself have complex parameters among them."""
_WRITTEN = {*SQUARE.values(), *GIVEN.values()}
_WRITTEN |= {f"{name}={value}" for name, values in OPTIONS.items() for value in values}


def possible(program: Program) -> bool:
    """Check a program's options, models and optimizers."""
    if any(option not in _WRITTEN or _misfits(program.models, option) for option in program.options):
        return False
    if (
        program.precision not in PRECISIONS
        or program.begins not in ("", *BEGINNINGS)
        or not program.models
        or any(spec.module >= len(program.models) for spec in program.optimizers)
        or (is_made_before(program) and not _may_be_made_before(program))
    ):
        return False
    copied = program.averaged or program.precision == "bf16-true"
    if (copied and _writes(program.models)) or not _shared_as_taken(program):
        return False
    if (program.compiled and not _may_be_compiled(program)) or not _may_be_complex(program):
        return False
    if not all(_may_be_sparse(program, spec) for spec in program.optimizers if _is_sparse(program, spec)):
        return False
    warmed = not program.warmed or _may_be_warmed(program)
    launched = not program.unlaunched or _may_be_unlaunched(program)
    stepped = all(_is_stepped(program, number) for number in range(len(program.models)))
    return (
        warmed
        and launched
        and (stepped or not _is_scaled(program))
        and all(_may_lack(program, spec, spec.without) for spec in program.optimizers if spec.without)
    )


def _may_be_unlaunched(program: Program) -> bool:
    """Check that a program has one rank, and reads no variable that a launcher sets."""
    return program.world_size == 1 and not any("os.environ" in each or "[model." in each for each in program.options)


def _may_be_warmed(program: Program) -> bool:
    """Check that a backward may come before the optimizer, which has to be the one that its denominators wait for."""
    alone = len(program.models) == len(program.optimizers) == 1 and not program.optimizers[0].without
    return program.late and alone and not _is_scaled(program)


def _has_part(models: Sequence[ModelSpec], part: str) -> bool:
    """Check whether one of some models has a part."""
    return any(part in model.parts for model in models)


def _may_be_made_before(program: Program) -> bool:
    """Check that a program has one model, and that this needs nothing of its strategy: neither weights nor units."""
    return program.apart and not program.wrapped and len(program.models) == 1


def _writes(models: Sequence[ModelSpec]) -> bool:
    """Check whether forwards of some models write to their parameters."""
    return any(_has_part(models, part) for part in WRITING)


def _may_be_complex(program: Program) -> bool:
    """Check that torch computes with complex parameters and steps them, where models have some."""
    if not any(_has_part(program.models, part) for part in COMPLEX):
        return True
    if program.strategy.startswith(REAL_ALONE) or program.precision != "32-true" or program.compiled:
        return False
    return all(spec.kind not in NOT_COMPLEX and not spec.fused for spec in program.optimizers)


def _misfits(models: Sequence[ModelSpec], option: str) -> bool:
    """Check whether a part would read weights of units inside it, which are away, or nothing is left to shard."""
    if option == "ignored_modules=[torch.nn.Linear]":
        return any(_is_linear(model.parts) for model in models)
    return option.startswith("auto_wrap_policy") and _has_part(models, "weighed")


@functools.lru_cache(maxsize=1000)
def _is_linear(parts: tuple[str, ...]) -> bool:
    """Check whether all parameters of a model are those of linear layers."""
    with torch.device("meta"):
        model = Model(*parts)
    linear = {each for part in model.modules() if isinstance(part, torch.nn.Linear) for each in part.parameters()}
    return linear == set(model.parameters())


def _is_stepped(program: Program, number: int) -> bool:
    """Check whether a module has an optimizer."""
    return number in [spec.module for spec in program.optimizers]


def _is_scaled(program: Program) -> bool:
    """Check whether losses are multiplied by a gradient scaler, which divides what an optimizer has."""
    return POLICIES[program.precision].scaled


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


def draw_frame(seed: int, strategy: str, world_size: int, card: StrategyInfo, chance: random.Random) -> Program:
    """Draw everything but the operations.

    Args:
        seed: The program's.
        strategy: The name of the strategy it begins under.
        world_size: How many ranks.
        card: What the strategy says of itself.
        chance: What is drawn from.

    Returns:
        A program that only sets up.
    """
    own_kernels = "cpu" not in card.devices
    several = chance.random() < 0.15 and Capability.SEVERAL_MODULES in card.capabilities
    models: list[ModelSpec] = []
    for _ in range(1 + several):
        weights = [_RARE.get(part, 1.0) for part in PARTS]
        parts = tuple(dict.fromkeys(chance.choices(list(PARTS), weights, k=chance.randint(2, 5))))
        lots = {part: random.Random(f"{seed} {len(models)} {name}").random() for name, part in _ADDED.items()}
        added = (part for part, lot in lots.items() if lot < _OFTEN)
        parts = (*parts, *(part for part in added if part != "reassigned" or not own_kernels))
        models.append(ModelSpec(parts=parts, output=chance.choice(["tensor", "tuple", "dict", "object"])))
    two = several or (chance.random() < 0.2 and Capability.MULTIPLE_OPTIMIZERS in card.capabilities)
    # Torch's Adafactor divides by the number of elements.
    divides = not _has_part(models, "empty") and Capability.ANY_OPTIMIZER in card.capabilities
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
    if precision == "bf16-true" and _writes(models):
        precision = "32-true"
    if _has_part(models, "sparse"):
        precision = "32-true" if POLICIES[precision].scaled else precision
        kinds = [kind for kind in SPARSE if precision not in CAST or kind not in MADE_WHOLE]
        changes: dict[str, Any] = {"kind": chance.choice(kinds), "fused": False, "weight_decay": 0.0}
        optimizers = [dataclasses.replace(spec, **changes) for spec in optimizers]
    if several and chance.random() < 0.25 and not POLICIES[precision].scaled:
        optimizers = optimizers[:1]
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
        averaged=chance.random() < 0.25 and precision in EXACT and not _writes(models),
        apart=random.Random(f"{seed} apart").random() < 0.25,
        wrapped=chance.random() < 0.08,
        begins=_beginning(seed),
        options=_options([each for each in offered(strategy) if not _misfits(models, each)], chance),
    )
    if world_size > 2 and world_size % 2 == 0:
        drawn = dataclasses.replace(drawn, options=_in_a_square(drawn.options, card))
    drawn = _compiled(drawn, card, chance)
    if two and not several and divides and not any(_is_sparse(drawn, spec) for spec in optimizers):
        drawn = _taking(drawn, chance)
    lacking = tuple(_lacking(drawn, spec, chance) for spec in drawn.optimizers)
    drawn = _warmed(_given(_with_complex(dataclasses.replace(drawn, optimizers=lacking)), card), card)
    unlaunched = dataclasses.replace(drawn, unlaunched=True)
    lot = random.Random(f"{seed} unlaunched").random()
    return unlaunched if lot < _UNLAUNCHED and possible(unlaunched) and not own_kernels else drawn


def _given(program: Program, card: StrategyInfo) -> Program:
    """Return a program whose strategy may be given objects: by chances of its own, for options that are not drawn."""
    chance = random.Random(f"{program.seed} given")
    offers = {option.partition("=")[0] for option in offered(card.name)} - card.presets.keys()
    for name, option in GIVEN.items():
        lot, named = chance.random(), [each.partition("=")[0] for each in program.options]
        has = name in offers and "cpu" in card.devices
        if has and lot < _OFTEN and name not in named and APART.get(name) not in named:
            apart = program.apart or "[model." in option
            given = dataclasses.replace(program, options=(*program.options, option), apart=apart)
            program = given if possible(given) else program
    return program


def _warmed(program: Program, card: StrategyInfo) -> Program:
    """Return a program whose optimizer may be set up after a backward: by chances of its own."""
    warmed = dataclasses.replace(program, warmed=True)
    able = Capability.DENOMINATOR in card.capabilities and "cpu" in card.devices
    lot = random.Random(f"{program.seed} warmed").random()
    return warmed if able and lot < _WARMED and possible(warmed) else program


def _with_complex(program: Program) -> Program:
    """Return a program whose first model may have complex parameters."""
    first, *others = program.models
    added = dataclasses.replace(first, parts=(*first.parts, *COMPLEX))
    turned = dataclasses.replace(program, models=(added, *others))
    lot = random.Random(f"{program.seed} {' '.join(COMPLEX)}").random()
    often = _ALONE if program.wrapped else _OFTEN  # a part that is a unit may have more complex than real ones
    return turned if lot < often and possible(turned) else program


def _beginning(seed: int) -> str:
    """Draw by what the environment is set up: by chances of its own, so that seeds go on drawing what they have."""
    chance = random.Random(f"{seed} begins")
    return chance.choice(BEGINNINGS) if chance.random() < _BEGINS else ""


def _in_a_square(options: Sequence[str], card: StrategyInfo) -> tuple[str, ...]:
    """Return options with that which makes two dimensions of more ranks, where a strategy is made for such."""
    made = {"tensor_parallel_size"} & {option.name for option in card.options} or {"device_mesh"} & card.presets.keys()
    others = [option for option in options if option.partition("=")[0] not in made]
    return (*others, *(SQUARE[name] for name in made))


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
    """Draw options, each with one value: the more there are, the more often, and the more of them."""
    if chance.random() < 0.7 - len(offers) / 100:
        return ()
    return agreeing(chance.sample(offers, min(len(offers), chance.randint(1, 3 + len(offers) // 8))))
