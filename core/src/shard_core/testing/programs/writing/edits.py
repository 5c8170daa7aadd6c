"""The statements that change gradients, weights and optimizers' state by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_core.testing.programs.program import MODULES
from shard_core.testing.programs.writing.expressions import grouped

if TYPE_CHECKING:
    from shard_core.testing.programs import operations as ops
    from shard_core.testing.programs.program import Program


def edited_gradients(operation: ops.EditGradients, program: Program) -> list[str]:
    """Write the lines that change a module's gradients, or those of what its optimizers hold."""
    if operation.how == "groups' data":
        loop = f"for parameter in {grouped(program, operation.module)}:"
        edit = f"        parameter.grad.data = {operation.factor} * parameter.grad.data"
        return [loop, "    if parameter.grad is not None:", edit]
    parameters = f"{MODULES[operation.module]}.parameters()"
    if operation.how == "clipped":
        return [f"torch.nn.utils.clip_grad_norm_({parameters}, 0.5)"]
    if operation.how == "foreach":
        found = f"gradients = [each.grad for each in {parameters} if each.grad is not None]"
        return [found, "if gradients:", f"    torch._foreach_mul_(gradients, {operation.factor})"]
    multiplied = f".mul_({operation.factor})"
    counted = f"{multiplied[:-1]} / max(parameter.grad.numel(), 1) ** 0.5)"
    edits = {"infinite": ".add_(float('inf'))", "data": f".data{multiplied}", "counted": counted}
    edits["assigned"] = f" = {operation.factor} * parameter.grad"
    edit = f"        parameter.grad{edits.get(operation.how, multiplied)}"
    return [f"for parameter in {parameters}:", "    if parameter.grad is not None:", edit]


def edited_weights(operation: ops.EditWeights, program: Program) -> list[str]:
    """Write the lines that change one of a module's weights, or all that its optimizers hold."""
    if operation.how.startswith("groups"):
        edited = "parameter.data" if operation.how == "groups' data" else "parameter"
        loop = f"    for parameter in {grouped(program, operation.module)}:"
        return ["with torch.no_grad():", loop, f"        {edited}.mul_({operation.factor})"]
    chosen = f"parameters = list({MODULES[operation.module]}.parameters())"
    edited, factor = f"parameters[{operation.which} % len(parameters)]", operation.factor
    if operation.how == "data":
        return [chosen, f"edited = {edited}", f"edited.data = edited.data * {factor}"]
    return [chosen, "with torch.no_grad():", f"    {edited}.mul_({factor})"]


def dropped(module: int) -> list[str]:
    """Write the lines that throw a module's gradients away, parameter by parameter."""
    return [f"for parameter in {MODULES[module]}.parameters():", "    parameter.grad = None"]


def forgotten(operation: ops.Initialize, optimizer: str) -> list[str]:
    """Write the lines that have an optimizer forget the state of what was drawn anew, or begin it anew."""
    if operation.restarts:
        anew = "{slot: torch.zeros_like(drawn) for slot, value in slots.items() if getattr(value, 'ndim', 0)}"
        return [f"slots = {optimizer}.state.get(drawn, {{}})", f"slots.update({anew})"]
    return [f"{optimizer}.state.pop(drawn, None)"] if operation.forgets else []
