"""The statements of a program's script: each operation in Python, and what it shows."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.program import MODULES, OPTIMIZERS, SCHEDULERS, everything, optimizers_over
from shard_core.testing.programs.writing.edits import dropped, edited_gradients, edited_weights, forgotten
from shard_core.testing.programs.writing.expressions import (
    added_group,
    batch_of,
    built,
    made_before,
    owned,
    shown_state,
    states_of,
    strategy_of,
)
from shard_core.testing.programs.writing.failures import failure

if TYPE_CHECKING:
    from shard_core.testing.programs.operations import Operation
    from shard_core.testing.programs.program import Program

Lines = tuple[list[str], list[str]]

_CONTEXTS = {"no_grad": "torch.no_grad()", "inference": "torch.inference_mode()"}
_CASTS = {"bf16-true": ", cast=True"}  # some strategies step float32 copies, and save these
_CONTEXTS |= {"failed": "failing()", "failed evaluation": "failing(), torch.no_grad()"}
_EUCLIDEAN = 2.0
"""The kind of norm that is not named: torch and strategies clip by it unless told otherwise."""


@functools.singledispatch
def statements(operation: Operation, program: Program, number: int, saved: str) -> Lines:
    """Write one operation: its lines, and what it shows."""
    raise NotImplementedError(operation, program, number, saved)


@statements.register(ops.Evaluate)
def _(operation: ops.Evaluate, *_: object) -> Lines:
    name, count = MODULES[operation.module], f"{operation.samples}, {operation.batch_size}"
    return [f"outputs = evaluate(strategy, {name}, {operation.key}, {count})"], ["outputs=outputs"]


@statements.register(ops.ClipNorm)
def _(operation: ops.ClipNorm, program: Program, *_: object) -> Lines:
    kind = ', float("inf")' if math.isinf(operation.norm_type) else f", {operation.norm_type}"
    more = ("" if operation.norm_type == _EUCLIDEAN else kind) + ", error_if_nonfinite=False" * (not operation.finite)
    call = f"strategy.clip_gradients_norm({owned(program, operation.optimizer)}, {operation.max_norm}{more})"
    name, call = ("failed", f"fails(lambda: {call})") if operation.fails else ("norm", call)
    return [f"{name} = {call}"], [f"{name}={name}"]


@statements.register(ops.ClipValue)
def _(operation: ops.ClipValue, program: Program, *_: object) -> Lines:
    return [f"strategy.clip_gradients_value({owned(program, operation.optimizer)}, {operation.value})"], []


@statements.register(ops.Step)
def _(operation: ops.Step, program: Program, *_: object) -> Lines:
    name = OPTIMIZERS[operation.optimizer]
    if operation.by_hand:
        return [f"{name}.step()"], [f"**{shown_state(program)}"]
    return [f"stepped = strategy.optimizer_step({name})"], ["stepped=stepped", f"**{shown_state(program)}"]


@statements.register(ops.Closure)
def _(operation: ops.Closure, program: Program, *_: object) -> Lines:
    name, optimizer = MODULES[program.optimizers[operation.optimizer].module], OPTIMIZERS[operation.optimizer]
    step = "loss = {}.step(closure)" if operation.by_hand else "stepped = strategy.optimizer_step({}, closure)"
    return [
        f"given = {batch_of(program, operation.key, operation.rows)}",
        "def closure():",
        f"    {optimizer}.zero_grad()",
        f"    loss = loss_of({name}(given), given)",
        f"    strategy.backward(loss, {name})",
        "    return loss",
        step.format(optimizer),
    ], ["loss=loss" if operation.by_hand else "stepped=stepped", f"**{shown_state(program)}"]


@statements.register(ops.ZeroGrad)
def _(operation: ops.ZeroGrad, *_: object) -> Lines:
    owner = (MODULES if operation.of_module else OPTIMIZERS)[operation.which]
    return [f"{owner}.zero_grad({'' if operation.set_to_none else 'set_to_none=False'})"], []


@statements.register(ops.ZeroByHand)
def _(operation: ops.ZeroByHand, *_: object) -> Lines:
    if operation.set_to_none:
        return dropped(operation.module), []
    loop = f"for parameter in {MODULES[operation.module]}.parameters():"
    return [loop, "    if parameter.grad is not None:", "        parameter.grad.zero_()"], []


@statements.register(ops.EditGradients)
def _(operation: ops.EditGradients, program: Program, *_: object) -> Lines:
    return edited_gradients(operation, program), []


@statements.register(ops.EditWeights)
def _(operation: ops.EditWeights, program: Program, *_: object) -> Lines:
    return edited_weights(operation, program), [f"**{shown_state(program)}"] * operation.shown


@statements.register(ops.ChangeLearningRate)
def _(operation: ops.ChangeLearningRate, *_: object) -> Lines:
    loop = f"for group in {OPTIMIZERS[operation.optimizer]}.param_groups:"
    return [loop, f"    group['lr'] *= {operation.factor}"], []


@statements.register(ops.AddGroup)
def _(operation: ops.AddGroup, program: Program, *_: object) -> Lines:
    return [added_group(operation, program)], [f"**{shown_state(program)}"]


@statements.register(ops.StepScheduler)
def _(operation: ops.StepScheduler, *_: object) -> Lines:
    name = SCHEDULERS[operation.optimizer]
    return [f"{name}.step()"], [f"rate={name}.get_last_lr()"]


@statements.register(ops.Freeze)
def _(operation: ops.Freeze, *_: object) -> Lines:
    part = f"strategy.unwrap({MODULES[operation.module]}).parts[{operation.part!r}]"
    return [f"{part}.requires_grad_({operation.trained})"], []


@statements.register(ops.HookGradients)
def _(operation: ops.HookGradients, *_: object) -> Lines:
    part = f"strategy.unwrap({MODULES[operation.module]}).parts[{operation.part!r}]"
    hook = f"parameter.register_hook(lambda gradient: {operation.factor} * gradient)"
    return [f"for parameter in {part}.parameters():", "    if parameter.requires_grad:", f"        {hook}"], []


@statements.register(ops.Initialize)
def _(operation: ops.Initialize, program: Program, *_: object) -> Lines:
    own = (OPTIMIZERS[number] for number, spec in enumerate(program.optimizers) if spec.module == operation.module)
    lines = [
        f"parameters = list({MODULES[operation.module]}.parameters())",
        f"drawn = parameters[{operation.which} % len(parameters)]",
        "torch.nn.init.normal_(drawn, std=0.3)",
        *[line for optimizer in own for line in forgotten(operation, optimizer)],
    ]
    return lines, [f"**{shown_state(program)}"] * operation.shown


@statements.register(ops.UpdateAverage)
def _(*_: object) -> Lines:
    return ["average.update()"], []


@statements.register(ops.ShowAverage)
def _(operation: ops.ShowAverage, program: Program, *_: object) -> Lines:
    name = MODULES[0]
    return [
        f"{name}.eval()",
        "with average.applied(), torch.no_grad():",
        f"    output = tensors_of({name}({batch_of(program, operation.key, (3,))}))[0]",
        f"    averaged = strategy.module_state_dict({name})",
        f"{name}.train()",
    ], ["output=output", "averaged=averaged"]


@statements.register(ops.ShowWeights)
def _(operation: ops.ShowWeights, program: Program, *_: object) -> Lines:
    del operation
    return [], [f"**{shown_state(program)}"]


@statements.register(ops.ShowParameters)
def _(operation: ops.ShowParameters, *_: object) -> Lines:
    return [f"full = dict(strategy.full_parameters({MODULES[operation.module]}))"], ["full=full"]


@statements.register(ops.ShowGradients)
def _(operation: ops.ShowGradients, *_: object) -> Lines:
    return [f"gradients = strategy.module_gradients({MODULES[operation.module]})"], ["gradients=gradients"]


@statements.register(ops.LoadStateDict)
def _(operation: ops.LoadStateDict, program: Program, *_: object) -> Lines:
    name, factor = MODULES[operation.module], operation.factor
    return [
        f"weights = strategy.broadcast(strategy.module_state_dict({name}))",
        f"scaled = {{key: each * {factor} if each.is_floating_point() else each for key, each in weights.items()}}",
        f"strategy.unwrap({name}).load_state_dict(scaled)",
    ], [f"**{shown_state(program)}"] * operation.shown


@statements.register(ops.ReloadOptimizer)
def _(operation: ops.ReloadOptimizer, program: Program, *_: object) -> Lines:
    name = OPTIMIZERS[operation.optimizer]
    return [f"{name}.load_state_dict({name}.state_dict())"], [f"**{shown_state(program)}"] * operation.shown


@statements.register(ops.Reduce)
def _(operation: ops.Reduce, *_: object) -> Lines:
    calls = {
        "gather": "all_gather(numbers, 'data_parallel')",
        "dict": "reduce({'numbers': numbers, 'rank': float(rank)}, 'data_parallel')",
    }
    call = calls.get(operation.how, f"all_reduce(numbers, 'data_parallel', {operation.how!r})")
    lines = [f"numbers = batch({operation.key}, rank, 2).inputs", f"reduced = strategy.{call}"]
    if operation.how == "gather":  # autograd does not follow unless it is asked to
        lines[0] += ".requires_grad_()"
        return lines, ["reduced=reduced", "tracked=reduced.requires_grad"]
    return lines, ["reduced=reduced['numbers'] + reduced['rank']" if operation.how == "dict" else "reduced=reduced"]


@statements.register(ops.Seed)
def _(operation: ops.Seed, *_: object) -> Lines:
    return [f"strategy.seed_everything({operation.seed})"], []


@statements.register(ops.Save)
def _(operation: ops.Save, program: Program, number: int, *_: object) -> Lines:
    more = ("" if operation.blocking else ", blocking=False") + ("" if operation.frozen else ", frozen=False")
    path = f"f'{{folder}}/saved-{number}'"
    return [f"saving = strategy.save_checkpoint({path}, {states_of(everything(program))}{more})"], []


@statements.register(ops.Load)
def _(operation: ops.Load, program: Program, number: int, saved: str) -> Lines:
    del number
    path = "strategy.latest_checkpoint(folder)" if operation.how == "latest" else f"f'{{folder}}/{saved}'"
    names = MODULES[: len(program.models)] if operation.how == "modules" else everything(program)
    called = f"left = strategy.load_checkpoint({path}, {states_of(names)}{_CASTS.get(program.precision, '')})"
    return ["saving.wait()", called], ["left=len(left)", f"**{shown_state(program)}"]


@statements.register(ops.Fail)
def _(operation: ops.Fail, program: Program, number: int, saved: str) -> Lines:
    return failure(operation, program, number, saved), ["failed=failed", f"**{shown_state(program)}"]


@statements.register(ops.Attempt)
def _(operation: ops.Attempt, program: Program, number: int, saved: str) -> Lines:
    lines, shown = statements(operation.refused, program, number, saved)
    names = MODULES[: len(program.models)]
    restored = [f"{name}.{call}()" for name in names for call in ("zero_grad", "train")]
    inside = [f"    {line}" for line in (*lines, *([f"dict({', '.join(shown)})"] if shown else []))]
    return ["with refused():", *inside, *restored, "strategy.seed_everything(0)"], [f"**{shown_state(program)}"]


@statements.register(ops.SavePretrained)
def _(operation: ops.SavePretrained, *_: object) -> Lines:
    name = MODULES[operation.module]
    return [f"strategy.unwrap({name}).save_pretrained(f'{{folder}}/{name}')"], []


@statements.register(ops.LoadWeights)
def _(operation: ops.LoadWeights, program: Program, *_: object) -> Lines:
    name = MODULES[operation.module]
    cast = _CASTS.get(program.precision, "")
    return [f"strategy.load_weights(f'{{folder}}/{name}/weights.pt', {name}{cast})"], [f"**{shown_state(program)}"]


@statements.register(ops.Switch)
def _(operation: ops.Switch, program: Program, number: int, saved: str) -> Lines:
    folder, states = saved if operation.resumed else f"switch-{number}", states_of(everything(program))
    path, more = f"f'{{folder}}/{folder}'", "" if operation.blocking else ", blocking=False"
    return [
        *([] if operation.resumed else [f"strategy.save_checkpoint({path}, {states}{more})"]),
        "strategy.teardown()",
        *([] if operation.same else [*made_before(program), f"strategy = {strategy_of(program, operation.strategy)}"]),
        "strategy.setup_environment()",
        *(["rank = strategy.distributed_sampler_kwargs['rank']"] if operation.world_size else []),
        built(program),
        *(added_group(each, program) for each in program.operations[:number] if isinstance(each, ops.AddGroup)),
        f"strategy.load_checkpoint({path}, {states}{_CASTS.get(program.precision, '')})",
    ], [f"**{shown_state(program)}"]


def _zeroed(operation: ops.Backward, program: Program) -> list[str]:
    """Write the lines that throw gradients away between a forward and its backward, if it does so."""
    mine = [OPTIMIZERS[each] for each in optimizers_over(program, operation.module)]
    owners = {"zeroed": mine, "cleared": [MODULES[operation.module]]}.get(operation.how, [])
    return dropped(operation.module) if operation.how == "dropped" else [f"{each}.zero_grad()" for each in owners]


def _penalized(how: str, loss: str, backward: str) -> list[str]:
    """Write the lines of a backward of the squares of a loss's gradients for the inputs, with the loss or alone."""
    slope = "(slope,) = torch.autograd.grad(loss, given.inputs, create_graph=True)"
    squares = f"loss = {'loss + ' * (how == 'penalty')}slope.square().mean()"
    return ["given.inputs.requires_grad_()", loss, slope, squares, backward if "hand" not in how else "loss.backward()"]


@statements.register(ops.Backward)
def _(operation: ops.Backward, program: Program, *_: object) -> Lines:
    name = MODULES[operation.module]
    reduction = ", 'sum'" if operation.denominator else ""
    counted = ", denominator=len(given.inputs)" if operation.denominator else ""
    extra = f", extra={'rank == 0' if operation.alone and not operation.unused else True}" if operation.extra else ""
    extra += ", unused=rank > 0" if operation.alone and operation.unused else ""
    lines = [f"given = {batch_of(program, operation.key, operation.rows)}"]
    loss = f"loss = loss_of({name}(given{extra}), given{reduction})"
    other, second = f"other = {batch_of(program, operation.key + 1, operation.rows)}", f"{name}(other{extra})"
    backward, shown = f"strategy.backward(loss, {name}{counted})", ["loss=loss"]
    match operation.how:
        case "plain" | "by hand" | "zeroed" | "cleared" | "dropped" | "squares":
            trained = f"(each for each in {name}.parameters() if each.requires_grad)"
            squared = [f"for each in {trained}:", f"    strategy.backward(0.01 * each.square().sum(), {name})"]
            lines += [loss, *_zeroed(operation, program), "loss.backward()" if operation.how == "by hand" else backward]
            lines += squared * (operation.how == "squares")
        case "accumulated":
            lines = [f"for micro in range({ops.MICRO_BATCHES}):"]
            lines += [f"    given = {batch_of(program, f'{operation.key} + micro', operation.rows)}"]
            lines += [f"    with strategy.no_backward_sync({name}, enabled=micro < {ops.MICRO_BATCHES - 1}):"]
            lines += [f"        {loss}", f"        {backward}"]
        case "retain_graph":
            lines += [loss, f"{backward[:-1]}, retain_graph=True)", backward.replace("loss", "0.5 * loss")]
        case "two_forwards":
            lines += [other, f"{loss} + loss_of({second}, other{reduction})", backward]
        case "crossed":
            lines += [loss, other, f"later = loss_of({second}, other{reduction})"]
            lines += [f"strategy.backward({each}, {name}{counted})" for each in ("later", "loss")]
            shown += ["later=later"]
        case "gradient":
            line = f"strategy.backward(output, {name}, gradient=0.1 * given.targets.to(output))"
            lines += [f"output = strategy.unwrap({name}).bend(tensors_of({name}(given{extra}))[0])", line]
            shown = ["loss=output.sum()"]
        case "contrastive":
            lines += [
                f"mine = tensors_of({name}(given{extra}))[0]",
                "everyone = strategy.all_gather(mine, 'data_parallel', sync_grads=True)",
                "loss = contrast_of(mine, everyone, rank)",
                f"strategy.backward(loss, {name})",
            ]
        case "frozen":
            top = f"strategy.unwrap({name}).head.requires_grad_"
            lines += [loss, f"{top}(False)", backward, f"{top}(True)"]
        case "eval":
            lines += [f"{name}.eval()", loss, backward, f"{name}.train()"]
        case "penalty" | "slopes" | "slopes by hand":
            past = f"loss = tensors_of({name}(given{extra}))[0].sum()"
            lines += _penalized(operation.how, loss if operation.how == "penalty" else past, backward)
        case "through" | "detached":
            fed = f"fed_back(given, {MODULES[0]}(given){', detached=True' * (operation.how == 'detached')})"
            lines += [f"loss = loss_of({MODULES[1]}({fed}), given{reduction})", backward]
        case "method" | "layers":
            score = f"strategy.unwrap({name}).{'score' if operation.how == 'method' else 'layers'}(given{extra})"
            lines += [f"loss = {score}.{'sum' if operation.denominator else 'mean'}()", backward]
    inside = [f"with strategy.no_backward_sync({name}):", *(f"    {line}" for line in lines)]
    return inside if operation.deferred else lines, shown


@statements.register(ops.Forward)
def _(operation: ops.Forward, program: Program, *_: object) -> Lines:
    name = MODULES[operation.module]
    called = f"strategy.unwrap({name})" if operation.how in ("unwrap", "method") else name
    fails = operation.how.startswith("failed")
    given = batch_of(program, operation.key, (3,))
    if fails:
        given += ", fails=KeyboardInterrupt" if operation.stopped else ", fails=True"
    line = f"output = tensors_of({called}{'.score' if operation.how == 'method' else ''}({given}))[0]"
    context = _CONTEXTS.get(operation.how)
    lines = [f"with {context}:", f"    {line}"] if context else [line]
    if operation.how in ("eval", "inference", "failed evaluation"):
        lines = [f"{name}.eval()", *lines, f"{name}.train()"]
    if operation.how == "interrupted by hand":
        lines += ["interrupted(output.sum().backward, output)"]
        lines += [f"{each}.zero_grad()" for each in MODULES[: len(program.models)]]
    if operation.how == "interrupted":
        lines += [f"interrupted(lambda: strategy.backward(output.sum(), {name}), output)"]
    return lines, [] if fails else ["output=output.detach()"]
