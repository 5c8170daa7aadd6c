"""The statements of what has to fail by one of our errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_core.testing.programs.program import MODULES, STUBBORN, everything
from shard_core.testing.programs.vocabulary import PREMATURE
from shard_core.testing.programs.writing.expressions import owned, states_of

if TYPE_CHECKING:
    from shard_core.testing.programs import operations as ops
    from shard_core.testing.programs.program import Program


def failure(operation: ops.Fail, program: Program, number: int, saved: str) -> list[str]:
    """Write the lines that try it and set ``failed`` to whether it has failed so.

    Args:
        operation: What is tried.
        program: Whose models and optimizers.
        number: Of the operation, by which files are named.
        saved: The name of the last checkpoint.
    """
    states = states_of(everything(program))
    if operation.how in PREMATURE.values():
        owned_by = owned(program, operation.optimizer)
        call = {
            "step": f"optimizer_step({owned_by.split(', ')[1]})",
            "norm": f"clip_gradients_norm({owned_by}, 1.0)",
            "value": f"clip_gradients_value({owned_by}, 1.0)",
            "gradients": f"module_gradients({owned_by.split(', ')[0]})",
        }[operation.how]
        return [f"failed = fails(lambda: strategy.{call})"]
    if operation.how == "object":
        called = f"fails(lambda: strategy.load_checkpoint(f'{{folder}}/{saved}', {states}))"
        refuses = f"{STUBBORN}.refuses = rank == 0"
        return ["saving.wait()", refuses, f"failed = {called}", f"{STUBBORN}.refuses = False"]
    if operation.how == "load":
        path, lacking = f"f'{{folder}}/{saved}'", f"{{'lacking': 3, **{states}}}"
        return ["saving.wait()", f"failed = fails(lambda: strategy.load_checkpoint({path}, {lacking}))"]
    path = f"f'{{folder}}/taken-{number}'"
    mistakes = {
        "set up": f"setup_module(strategy.unwrap({MODULES[0]}))",
        "foreign": "optimizer_step(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))",
        "form": f"save_checkpoint({path}, {states}, state_dict_type='whole')",
    }
    if operation.how in mistakes:
        return [f"failed = fails(lambda: strategy.{mistakes[operation.how]})"]
    made = f"open({path}, 'w').close()"
    if operation.how == "unwaited":
        begun = f"lambda: strategy.save_checkpoint({path}, {states}, blocking=False)"
        after = f"lambda: strategy.save_checkpoint(f'{{folder}}/after-{number}', {states})"
        return [made, f"failed = fails({begun}) or fails({after})"]
    more = ", blocking=False).wait()" if operation.how == "background" else ")"
    return [made, f"failed = fails(lambda: strategy.save_checkpoint({path}, {states}{more})"]
