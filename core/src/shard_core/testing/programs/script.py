"""A program as a Python script, which is both what the ranks run and what people read."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from shard_core import plugins
from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.settings import options_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shard_core.testing.programs.operations import Operation
    from shard_core.testing.programs.program import OptimizerSpec, Program

Lines = tuple[list[str], list[str]]

MODULES = ("model", "critic")
OPTIMIZERS = ("optimizer", "second")
SCHEDULERS = ("scheduler", "second_scheduler")
_HEAD = '''\
"""{reason}"""

import torch

from shard_core import get_strategy
from shard_core.testing.programs import Model, batch, evaluate, loss_of, parameters_of, state, tensors_of


'''
_TAIL = """\


if __name__ == "__main__":  # shard run --devices {ranks} this_file.py
    main()
"""
_OPTIMIZERS = {
    "sgd": "SGD({parameters}, lr=0.05{more})",
    "momentum": "SGD({parameters}, lr=0.05, momentum=0.9{more})",
    "nesterov": "SGD({parameters}, lr=0.05, momentum=0.9, nesterov=True{more})",
    "adamw": "AdamW({parameters}, lr=0.01, eps=1e-6{more})",
    "amsgrad": "Adam({parameters}, lr=0.01, eps=1e-6, amsgrad=True{more})",
    "rmsprop": "RMSprop({parameters}, lr=0.005, momentum=0.5, eps=1e-3{more})",
    "adagrad": "Adagrad({parameters}, lr=0.02, eps=1e-6{more})",
}
_FORWARDS = {"train": "", "eval": "", "no_grad": "torch.no_grad()", "inference": "torch.inference_mode()", "unwrap": ""}


def script_of(program: Program, reason: str = "A random training program.") -> str:
    """Write a program as a script whose ``main(show)`` every rank calls.

    Args:
        program: What to write.
        reason: Its docstring.

    Returns:
        Python; ``show(number, **values)`` is called once after setup, with -1, and once after each operation.
    """
    lines = [*_build(program), "", "", *_main(program)]
    return _HEAD.format(reason=reason) + "\n".join(lines) + _TAIL.format(ranks=program.world_size)


def _build(program: Program) -> Iterator[str]:
    yield "def build(strategy):"
    yield f"    strategy.seed_everything({program.seed})"
    yield "    with strategy.module_init_context():"
    for name, model in zip(MODULES, program.models, strict=False):
        yield f"        {name} = Model({', '.join(map(repr, model.parts))}, output={model.output!r})"
    made = [f"    {name} = {_optimizer(program, spec)}" for name, spec in _optimizers(program)]
    if not program.late:
        yield from made
    for number, name in enumerate(MODULES[: len(program.models)]):
        own = [each for each, spec in _optimizers(program) if spec.module == number]
        if program.late:
            yield f"    {name} = strategy.setup_module({name})"
        else:
            names = "".join(f"{each}, " for each in own)
            yield f"    {name}, ({names}) = strategy.setup_module_and_optimizers({name}, [{', '.join(own)}])"
    if program.late:
        yield from made
        for name, _ in _optimizers(program):
            yield f"    {name} = strategy.setup_optimizer({name})"
    for name, (optimizer, spec) in zip(SCHEDULERS, _optimizers(program), strict=False):
        if spec.scheduled:
            yield f"    {name} = torch.optim.lr_scheduler.StepLR({optimizer}, 1, 0.9)"
    yield f"    return {', '.join(_everything(program))}"


def _main(program: Program) -> Iterator[str]:
    yield "def main(show=print, folder='checkpoints'):"
    yield f"    strategy = {_strategy(program, program.strategy)}"
    yield "    strategy.setup_environment()"
    yield "    rank = strategy.distributed_sampler_kwargs['rank']"
    yield f"    {', '.join(_everything(program))} = build(strategy)"
    yield f"    show(-1, **{_state(program)})"
    saved = ""
    for number, operation in enumerate(program.operations):
        lines, shown = _lines(operation, program, number, saved)
        saved = f"saved-{number}" if isinstance(operation, ops.Save) else saved
        yield from (f"    {line}" for line in lines)
        yield f"    show({number}{''.join(f', {each}' for each in shown)})"
    yield "    strategy.teardown()"


@functools.singledispatch
def _lines(operation: Operation, program: Program, number: int, saved: str) -> Lines:
    """Write one operation: its lines, and what it shows."""
    raise NotImplementedError(operation, program, number, saved)


@_lines.register(ops.Evaluate)
def _(operation: ops.Evaluate, *_: object) -> Lines:
    name, count = MODULES[operation.module], f"{operation.samples}, {operation.batch_size}"
    return [f"outputs = evaluate(strategy, {name}, {operation.key}, {count})"], ["outputs=outputs"]


@_lines.register(ops.ClipNorm)
def _(operation: ops.ClipNorm, program: Program, *_: object) -> Lines:
    kind = 'float("inf")' if math.isinf(operation.norm_type) else operation.norm_type
    call = f"strategy.clip_gradients_norm({_owned(program, operation.optimizer)}, {operation.max_norm}, {kind})"
    return [f"norm = {call}"], ["norm=norm"]


@_lines.register(ops.ClipValue)
def _(operation: ops.ClipValue, program: Program, *_: object) -> Lines:
    return [f"strategy.clip_gradients_value({_owned(program, operation.optimizer)}, {operation.value})"], []


@_lines.register(ops.Step)
def _(operation: ops.Step, program: Program, *_: object) -> Lines:
    line = f"stepped = strategy.optimizer_step({OPTIMIZERS[operation.optimizer]})"
    return [line], ["stepped=stepped", f"**{_state(program)}"]


@_lines.register(ops.Closure)
def _(operation: ops.Closure, program: Program, *_: object) -> Lines:
    name, optimizer = MODULES[program.optimizers[operation.optimizer].module], OPTIMIZERS[operation.optimizer]
    return [
        f"given = {_batch(program, operation.key, operation.rows)}",
        "def closure():",
        f"    {optimizer}.zero_grad()",
        f"    loss = loss_of({name}(given), given)",
        f"    strategy.backward(loss, {name})",
        "    return loss",
        f"stepped = strategy.optimizer_step({optimizer}, closure)",
    ], ["stepped=stepped", f"**{_state(program)}"]


@_lines.register(ops.ZeroGrad)
def _(operation: ops.ZeroGrad, *_: object) -> Lines:
    owner = (MODULES if operation.of_module else OPTIMIZERS)[operation.which]
    return [f"{owner}.zero_grad({'' if operation.set_to_none else 'set_to_none=False'})"], []


@_lines.register(ops.EditGradients)
def _(operation: ops.EditGradients, *_: object) -> Lines:
    loop = f"for parameter in {MODULES[operation.module]}.parameters():"
    return [loop, "    if parameter.grad is not None:", f"        parameter.grad.mul_({operation.factor})"], []


@_lines.register(ops.EditWeights)
def _(operation: ops.EditWeights, program: Program, *_: object) -> Lines:
    chosen = f"parameters = list({MODULES[operation.module]}.parameters())"
    edit = f"    parameters[{operation.which} % len(parameters)].mul_({operation.factor})"
    return [chosen, "with torch.no_grad():", edit], [f"**{_state(program)}"]


@_lines.register(ops.ChangeLearningRate)
def _(operation: ops.ChangeLearningRate, *_: object) -> Lines:
    loop = f"for group in {OPTIMIZERS[operation.optimizer]}.param_groups:"
    return [loop, f"    group['lr'] *= {operation.factor}"], []


@_lines.register(ops.StepScheduler)
def _(operation: ops.StepScheduler, *_: object) -> Lines:
    name = SCHEDULERS[operation.optimizer]
    return [f"{name}.step()"], [f"rate={name}.get_last_lr()"]


@_lines.register(ops.Freeze)
def _(operation: ops.Freeze, *_: object) -> Lines:
    part = f"strategy.unwrap({MODULES[operation.module]}).parts[{operation.part!r}]"
    return [f"{part}.requires_grad_({operation.trained})"], []


@_lines.register(ops.ShowWeights)
def _(operation: ops.ShowWeights, program: Program, *_: object) -> Lines:
    del operation
    return [], [f"**{_state(program)}"]


@_lines.register(ops.ShowGradients)
def _(operation: ops.ShowGradients, *_: object) -> Lines:
    return [f"gradients = strategy.module_gradients({MODULES[operation.module]})"], ["gradients=gradients"]


@_lines.register(ops.LoadStateDict)
def _(operation: ops.LoadStateDict, program: Program, *_: object) -> Lines:
    name, factor = MODULES[operation.module], operation.factor
    return [
        f"weights = strategy.broadcast(strategy.module_state_dict({name}))",
        f"scaled = {{key: each * {factor} if each.is_floating_point() else each for key, each in weights.items()}}",
        f"strategy.unwrap({name}).load_state_dict(scaled)",
    ], [f"**{_state(program)}"]


@_lines.register(ops.ReloadOptimizer)
def _(operation: ops.ReloadOptimizer, program: Program, *_: object) -> Lines:
    name = OPTIMIZERS[operation.optimizer]
    return [f"{name}.load_state_dict({name}.state_dict())"], [f"**{_state(program)}"]


@_lines.register(ops.Reduce)
def _(operation: ops.Reduce, *_: object) -> Lines:
    gathers = operation.how == "gather"
    call = "all_gather(numbers" if gathers else f"all_reduce(numbers, reduce_op={operation.how!r}"
    reduced = f"reduced = strategy.{call}, group='data_parallel')"
    return [f"numbers = batch({operation.key}, rank, 2).inputs", reduced], ["reduced=reduced"]


@_lines.register(ops.Seed)
def _(operation: ops.Seed, *_: object) -> Lines:
    return [f"strategy.seed_everything({operation.seed})"], []


@_lines.register(ops.Save)
def _(operation: ops.Save, program: Program, number: int, *_: object) -> Lines:
    more = "" if operation.blocking else ", blocking=False"
    return [f"saving = strategy.save_checkpoint(f'{{folder}}/saved-{number}', {_states(program)}{more})"], []


@_lines.register(ops.Load)
def _(operation: ops.Load, program: Program, number: int, saved: str) -> Lines:
    del operation, number
    load = f"strategy.load_checkpoint(f'{{folder}}/{saved}', {_states(program)})"
    return ["saving.wait()", load], [f"**{_state(program)}"]


@_lines.register(ops.Switch)
def _(operation: ops.Switch, program: Program, number: int, *_: object) -> Lines:
    path, states = f"f'{{folder}}/switch-{number}'", _states(program)
    return [
        f"strategy.save_checkpoint({path}, {states})",
        "strategy.teardown()",
        f"strategy = {_strategy(program, operation.strategy)}",
        "strategy.setup_environment()",
        f"{', '.join(_everything(program))} = build(strategy)",
        f"strategy.load_checkpoint({path}, {states})",
    ], [f"**{_state(program)}"]


@_lines.register(ops.Backward)
def _(operation: ops.Backward, program: Program, *_: object) -> Lines:
    name = MODULES[operation.module]
    reduction = ", 'sum'" if operation.denominator else ""
    counted = ", denominator=len(given.inputs)" if operation.denominator else ""
    extra = ", extra=True" if operation.extra else ""
    lines = [f"given = {_batch(program, operation.key, operation.rows)}"]
    loss = f"loss = loss_of({name}(given{extra}), given{reduction})"
    shown = ["loss=loss"]
    match operation.how:
        case "plain":
            lines += [loss, f"strategy.backward(loss, {name}{counted})"]
        case "retain_graph":
            lines += [loss, f"strategy.backward(loss, {name}{counted}, retain_graph=True)"]
            lines += [f"strategy.backward(0.5 * loss, {name}{counted})"]
        case "two_forwards" | "crossed":
            other = f"other = {_batch(program, operation.key + 1, operation.rows)}"
            second = f"{name}(other{extra})"
            if operation.how == "two_forwards":
                lines += [other, f"{loss} + loss_of({second}, other{reduction})"]
                lines += [f"strategy.backward(loss, {name}{counted})"]
            else:
                lines += [loss, other, f"later = loss_of({second}, other{reduction})"]
                lines += [f"strategy.backward({each}, {name}{counted})" for each in ("later", "loss")]
                shown += ["later=later"]
        case "gradient":
            lines += [f"output = tensors_of({name}(given{extra}))[0]"]
            lines += [f"strategy.backward(output, {name}, gradient=0.1 * given.targets.to(output))"]
            shown = ["loss=output.sum()"]
        case "method":
            score = f"strategy.unwrap({name}).score(given{extra})"
            lines += [
                f"loss = {score}.{'sum' if operation.denominator else 'mean'}()",
                f"strategy.backward(loss, {name}{counted})",
            ]
    if operation.deferred:
        lines = [f"with strategy.no_backward_sync({name}):", *(f"    {line}" for line in lines)]
    return lines, shown


@_lines.register(ops.Forward)
def _(operation: ops.Forward, program: Program, *_: object) -> Lines:
    name = MODULES[operation.module]
    called = f"strategy.unwrap({name})" if operation.how == "unwrap" else name
    line = f"output = tensors_of({called}({_batch(program, operation.key, (3,))}))[0]"
    context = _FORWARDS[operation.how]
    lines = [f"with {context}:", f"    {line}"] if context else [line]
    if operation.how in ("eval", "inference"):
        lines = [f"{name}.eval()", *lines, f"{name}.train()"]
    return lines, ["output=output.detach()"]


def _batch(program: Program, key: int, rows: tuple[int, ...]) -> str:
    count = f"{rows}[rank]" if len(set(rows)) > 1 else str(rows[0])
    dtype = ", torch.float64" if program.precision == "64-true" else ""
    return f"strategy.batch_to_device(batch({key}, rank, {count}{dtype}))"


def _strategy(program: Program, name: str) -> str:
    more = "" if program.precision == "32-true" else f", precision={program.precision!r}"
    # A block that is not always called is what this option of strategies that have it is for.
    skips = any("extra" in model.parts for model in program.models)
    if skips and any(option.name == "find_unused_parameters" for option in plugins.find(name).options):
        more += ", find_unused_parameters=True"
    more += "".join(f", {option}" for option in options_for(name, program.options))
    return f"get_strategy({name!r}{more})"


def _optimizers(program: Program) -> list[tuple[str, OptimizerSpec]]:
    return list(zip(OPTIMIZERS, program.optimizers, strict=False))


def _optimizer(program: Program, spec: OptimizerSpec) -> str:
    peers = [each for each in program.optimizers if each.module == spec.module]
    share = f", share={peers.index(spec)}" if len(peers) > 1 else ""
    parameters = f"parameters_of({MODULES[spec.module]}, groups={spec.groups}{share})"
    more = f", weight_decay={spec.weight_decay}"
    more += ", maximize=True" if spec.maximize else ""
    more += f", foreach={spec.foreach}" if spec.foreach is not None else ""
    more += ", fused=True" if spec.fused else ""
    return "torch.optim." + _OPTIMIZERS[spec.kind].format(parameters=parameters, more=more)


def _owned(program: Program, which: int) -> str:
    """Write an optimizer after its module, as arguments."""
    return f"{MODULES[program.optimizers[which].module]}, {OPTIMIZERS[which]}"


def _everything(program: Program) -> list[str]:
    schedulers = [name for name, spec in zip(SCHEDULERS, program.optimizers, strict=False) if spec.scheduled]
    return [*MODULES[: len(program.models)], *OPTIMIZERS[: len(program.optimizers)], *schedulers]


def _states(program: Program) -> str:
    return "{" + ", ".join(f"{name!r}: {name}" for name in _everything(program)) + "}"


def _state(program: Program) -> str:
    modules, optimizers = MODULES[: len(program.models)], OPTIMIZERS[: len(program.optimizers)]
    return f"state(strategy, [{', '.join(modules)}], [{', '.join(optimizers)}])"
