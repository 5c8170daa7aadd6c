"""The statements of what has to fail by one of our errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_core.testing.programs.program import MODULES, OPTIMIZERS, STUBBORN, everything
from shard_core.testing.programs.vocabulary import PREMATURE
from shard_core.testing.programs.writing.expressions import owned, states_of

if TYPE_CHECKING:
    from shard_core.testing.programs import operations as ops
    from shard_core.testing.programs.program import Program

_STEPS = 10_000
"""More than any save takes that fails at once."""


def failure(operation: ops.Fail, program: Program, number: int, saved: str) -> list[str]:
    """Write the lines that try it and set ``failed`` to whether it has failed so.

    Args:
        operation: What is tried.
        program: Whose models and optimizers.
        number: Of the operation, by which files are named.
        saved: The name of the last checkpoint.
    """
    if operation.how in PREMATURE.values():
        return [f"failed = fails(lambda: strategy.{_premature(operation, program)})"]
    states = states_of(everything(program))
    if operation.how in ("object", "load"):
        return _load(operation, saved, states)
    path = f"f'{{folder}}/taken-{number}'"
    mistakes = {
        "set up": f"setup_module(strategy.unwrap({MODULES[0]}))",
        "foreign": "optimizer_step(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))",
        "form": f"save_checkpoint({path}, {states}, state_dict_type='whole')",
        "axis": "all_reduce(torch.ones(2), 'rows')",
        "layer": f"unwrap({MODULES[0]}).head(batch(0, rank, 2).inputs)",
    }
    if operation.how in mistakes:
        return [f"failed = fails(lambda: strategy.{mistakes[operation.how]})"]
    made = f"open({path}, 'w').close()"
    if operation.how == "steps":
        return [made, *_steps(operation, path, states)]
    if operation.how == "unwaited":
        begun = f"lambda: strategy.save_checkpoint({path}, {states}, blocking=False)"
        after = f"lambda: strategy.save_checkpoint(f'{{folder}}/after-{number}', {states})"
        return [made, f"failed = fails({begun}) or fails({after})"]
    more = ", blocking=False).wait()" if operation.how == "background" else ")"
    return [made, f"failed = fails(lambda: strategy.save_checkpoint({path}, {states}{more})"]


def _premature(operation: ops.Fail, program: Program) -> str:
    """Write the call that has to wait for a backward outside of ``no_backward_sync``."""
    module, optimizer = owned(program, operation.optimizer).split(", ")
    return {
        "step": f"optimizer_step({optimizer})",
        "norm": f"clip_gradients_norm({module}, {optimizer}, 1.0)",
        "value": f"clip_gradients_value({module}, {optimizer}, 1.0)",
        "gradients": f"module_gradients({module})",
    }[operation.how]


def _load(operation: ops.Fail, saved: str, states: str) -> list[str]:
    """Write the lines that load what does not fit: into an object that refuses it, or where there is none of it."""
    path = f"f'{{folder}}/{saved}'"
    if operation.how == "load":
        lacking = f"{{'lacking': 3, **{states}}}"
        return ["saving.wait()", f"failed = fails(lambda: strategy.load_checkpoint({path}, {lacking}))"]
    called = f"fails(lambda: strategy.load_checkpoint({path}, {states}))"
    refuses = f"{STUBBORN}.refuses = rank == 0"
    return ["saving.wait()", refuses, f"failed = {called}", f"{STUBBORN}.refuses = False"]


def _steps(operation: ops.Fail, path: str, states: str) -> list[str]:
    """Write the lines that step for as long as a save in the background takes to fail, and compare how long that is."""
    optimizer = OPTIMIZERS[operation.optimizer]
    step = f"strategy.optimizer_step({optimizer})"
    return [
        f"{optimizer}.zero_grad()",
        step,
        "steps = []",
        "def train():",
        f"    strategy.save_checkpoint({path}, {states}, blocking=False)",
        f"    for _ in range({_STEPS}):",
        f"        {step}",
        "        steps.append(1)",
        "failed = fails(train)",
        "counts = strategy.all_gather(torch.tensor([float(len(steps))]))  # all hear of it before the same step",
        "failed = failed and bool((counts == len(steps)).all())",
    ]
