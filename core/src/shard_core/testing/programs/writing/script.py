"""A program as a Python script, which is both what the ranks run and what people read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.program import (
    MODULES,
    OPTIMIZERS,
    SCHEDULERS,
    STUBBORN,
    everything,
    first_backward,
    segments,
    share_of,
)
from shard_core.testing.programs.settings import is_made_before
from shard_core.testing.programs.writing.expressions import built, made_before, model_of, shown_state, strategy_of
from shard_core.testing.programs.writing.statements import statements

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shard_core.testing.programs.program import OptimizerSpec, Program

_HEAD = '''\
"""{reason}"""

{before}import torch
{more}
from shard_core import {imports}
from shard_core.testing.programs import {own}


'''
_TAIL = """\


if __name__ == "__main__":  # {commands}
    {call}()
"""
_OWN = (
    *("Model", "Stubborn", "batch", "contrast_of", "evaluate", "failing", "fails", "fed_back", "interrupted"),
    *("loss_of", "parameters_of", "print_shown", "refused", "state", "tensors_of", "unlaunched"),
)
"""What scripts import of the kit where they name it."""
_MODULES = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel")
"""The modules that options name and ``import torch`` may leave out."""
_COMPILED = {
    "before": "{name} = torch.compile({name}, backend='aot_eager')",
    "in place": "{name}.compile(backend='aot_eager')",
    "after": "{name}.compile(backend='aot_eager')",
}
_OPTIMIZERS = {
    "sgd": "SGD({parameters}, lr=0.05{more})",
    "momentum": "SGD({parameters}, lr=0.05, momentum=0.9{more})",
    "nesterov": "SGD({parameters}, lr=0.05, momentum=0.9, nesterov=True{more})",
    "adamw": "AdamW({parameters}, lr=0.01, eps=1e-6{more})",
    "adam": "Adam({parameters}, lr=0.01, eps=1e-6{more})",
    "amsgrad": "Adam({parameters}, lr=0.01, eps=1e-6, amsgrad=True{more})",
    "rmsprop": "RMSprop({parameters}, lr=0.005, momentum=0.5, eps=1e-3{more})",
    "adagrad": "Adagrad({parameters}, lr=0.02, eps=1e-6{more})",
    "nadam": "NAdam({parameters}, lr=0.01, eps=1e-6{more})",
    "radam": "RAdam({parameters}, lr=0.01, eps=1e-6{more})",
    "adamax": "Adamax({parameters}, lr=0.01, eps=1e-6{more})",
    "asgd": "ASGD({parameters}, lr=0.05, t0=1{more})",
    "adadelta": "Adadelta({parameters}, lr=0.5{more})",
    "adafactor": "Adafactor({parameters}, lr=0.02{more})",
    "muon": "Muon({parameters}, lr=0.002{more})",
}


def script_of(program: Program, reason: str = "A random training program.") -> str:
    """Write a program as a script whose ``main(show)`` every rank calls, and what follows on other numbers of ranks.

    Args:
        program: What to write.
        reason: Its docstring.

    Returns:
        Python; ``show(number, **values)`` is called once after setup, with -1, and once after each operation.
    """
    body = "\n".join([*_build(program), "", "", *_main(program)])
    imports = "ExponentialMovingAverage, get_strategy" if program.averaged else "get_strategy"
    parts = segments(program)
    several = len(parts) > 1
    launchers = [f"shard run --nproc-per-node {each.world_size}" for each in parts]
    if program.unlaunched:
        launchers[0] = "python"
    commands = [f"{run} this_file.py{f' {each.entry}' * several}" for run, each in zip(launchers, parts, strict=True)]
    named = [name for name in _MODULES if any(name in option for option in program.options)]
    more = "".join(f"import {name}\n" for name in named)
    more += "from torch.distributed.fsdp.wrap import wrap\n" * program.wrapped
    before = "import os\n" * ("os.environ" in body) + "import sys\n" * several
    before += "\n" * bool(before)
    own = ", ".join(name for name in _OWN if re.search(rf"\b{name}\b", body))
    head = _HEAD.format(reason=reason, before=before, imports=imports, more=more, own=own)
    tail = _TAIL.format(commands=", then ".join(commands), call="globals()[sys.argv[1]]" if several else "main")
    return head + body + tail


def _build(program: Program) -> Iterator[str]:
    made = is_made_before(program)
    yield f"def build(strategy{f', {MODULES[0]}' * made}{', first=False' * program.warmed}):"
    yield f"    strategy.seed_everything({program.seed})"
    yield from () if made else _models(program)
    compiling = [f"    {_COMPILED[program.compiled].format(name=name)}" for name in _names(program) if program.compiled]
    if program.compiled != "after":
        yield from compiling
    optimizers = [f"    {name} = {_optimizer(program, spec)}" for name, spec in _optimizers(program)]
    if not program.late:
        yield from optimizers
    for number, name in enumerate(_names(program)):
        own = [each for each, spec in _optimizers(program) if spec.module == number]
        if program.late or not own:
            yield f"    {name} = strategy.setup_module({name})"
        else:
            names = ", ".join(own) + "," * (len(own) == 1)
            yield f"    {name}, ({names}) = strategy.setup_module_and_optimizers({name}, [{', '.join(own)}])"
    if program.late:
        yield from _late(program, optimizers)
    if program.compiled == "after":
        yield from compiling
    for name, (optimizer, spec) in zip(SCHEDULERS, _optimizers(program), strict=False):
        if spec.scheduled:
            yield f"    {name} = torch.optim.lr_scheduler.StepLR({optimizer}, 1, 0.9)"
    if program.averaged:
        yield f"    average = ExponentialMovingAverage(strategy, {MODULES[0]}, decay=0.9)"
    if STUBBORN in everything(program):
        yield f"    {STUBBORN} = Stubborn()"
    yield f"    return {', '.join(everything(program))}"


def _late(program: Program, optimizers: Sequence[str]) -> Iterator[str]:
    """Write what makes optimizers and sets them up after their modules, once after a backward; not after a switch."""
    if program.warmed:
        lines, _ = statements(first_backward(program), program, -1, "")
        yield "    if first:"
        yield from (f"        {line}" for line in ("rank = strategy.distributed_sampler_kwargs['rank']", *lines))
    yield from optimizers
    for name, _ in _optimizers(program):
        yield f"    {name} = strategy.setup_optimizer({name})"


def _models(program: Program) -> Iterator[str]:
    context = "torch.random.fork_rng()" if program.apart else "strategy.module_init_context()"
    sharded = ", strategy.module_sharded_context()" if program.wrapped else ""
    yield f"    with {context}{sharded}:"
    if program.apart:
        yield "        torch.manual_seed(strategy.global_rank)"
    for name, model in zip(MODULES, program.models, strict=False):
        yield f"        {name} = {model_of(model)}"
        if program.wrapped:
            yield f"        {name}.parts.update({{part: wrap(each) for part, each in {name}.parts.items()}})"


def _main(program: Program) -> Iterator[str]:
    yield "def main(show=print_shown, folder='checkpoints'):"
    yield from ["    unlaunched()"] * program.unlaunched
    yield from (f"    {line}" for line in made_before(program))
    yield f"    strategy = {strategy_of(program, program.strategy)}"
    yield f"    strategy.{program.begins or 'setup_environment()'}"
    yield "    rank = strategy.distributed_sampler_kwargs['rank']"
    yield f"    {built(program, first=program.warmed)}"
    yield f"    show(-1, **{shown_state(program)})"
    saved = ""
    begins = {each.begin: each.entry for each in segments(program)}
    for number, operation in enumerate(program.operations):
        lines, shown = statements(operation, program, number, saved)
        saved = f"saved-{number}" if isinstance(operation, ops.Save) else saved
        if number in begins:
            ends = lines.index("strategy.teardown()") + 1
            yield from (f"    {line}" for line in lines[:ends])
            yield from ("", "", f"def {begins[number]}(show=print_shown, folder='checkpoints'):")
            lines = lines[ends:]
        yield from (f"    {line}" for line in lines)
        yield f"    show({number}{''.join(f', {each}' for each in shown)})"
    yield "    strategy.teardown()"


def _names(program: Program) -> tuple[str, ...]:
    return MODULES[: len(program.models)]


def _optimizers(program: Program) -> list[tuple[str, OptimizerSpec]]:
    return list(zip(OPTIMIZERS, program.optimizers, strict=False))


def _optimizer(program: Program, spec: OptimizerSpec) -> str:
    share = share_of(program, spec)
    shared = f", share={share!r}" if share is not None else ""
    without = f", without={spec.without!r}" if spec.without else ""
    parameters = f"parameters_of({MODULES[spec.module]}, groups={spec.groups}{shared}{without})"
    more = f", weight_decay={spec.weight_decay}"
    more += ", maximize=True" if spec.maximize else ""
    more += f", foreach={spec.foreach}" if spec.foreach is not None else ""
    more += ", fused=True" if spec.fused else ""
    return "torch.optim." + _OPTIMIZERS[spec.kind].format(parameters=parameters, more=more)
