"""The expressions of a program's script: batches, strategies and what is shown, saved or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shard_core import plugins
from shard_core.testing.programs.parts import SKIPPING
from shard_core.testing.programs.plain.precisions import input_dtype
from shard_core.testing.programs.program import MODULES, OPTIMIZERS, everything
from shard_core.testing.programs.settings import is_made_before, options_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shard_core.testing.programs import operations as ops
    from shard_core.testing.programs.program import ModelSpec, Program


def batch_of(program: Program, key: int | str, rows: tuple[int, ...]) -> str:
    """Write the call that draws a data rank's batch and brings it to its device."""
    count = f"{rows}[rank]" if len(set(rows)) > 1 else str(rows[0])
    dtype = input_dtype(program.precision)
    more = "" if dtype == torch.float32 else f", {dtype}"
    return f"strategy.batch_to_device(batch({key}, rank, {count}{more}))"


def model_of(spec: ModelSpec) -> str:
    """Write the call that makes a model."""
    return f"Model({', '.join([*map(repr, spec.parts), f'output={spec.output!r}'])})"


def made_before(program: Program) -> list[str]:
    """Write what makes a model before the strategy that is given parts of it: other weights on each rank."""
    if not is_made_before(program):
        return []
    seeded = "torch.manual_seed(int(os.environ['RANK']))"
    return ["with torch.random.fork_rng():", f"    {seeded}", f"    {MODULES[0]} = {model_of(program.models[0])}"]


def built(program: Program, *, first: bool = False) -> str:
    """Write the call that builds all that a program trains with, of a model that may be there, perhaps ``first``."""
    given = f"strategy{f', {MODULES[0]}' * is_made_before(program)}{', first=True' * first}"
    return f"{', '.join(everything(program))} = build({given})"


def strategy_of(program: Program, name: str) -> str:
    """Write the call that makes a strategy, with the options of a program's that it has."""
    more = f", accelerator={program.device!r}" if program.device else ""
    more += "" if program.precision == "32-true" else f", precision={program.precision!r}"
    # Parameters that are not always used are what this option of strategies that have it is for.
    skips = any(part in SKIPPING for model in program.models for part in model.parts)
    if skips and any(option.name == "find_unused_parameters" for option in plugins.find(name).options):
        more += ", find_unused_parameters=True"
    more += "".join(f", {option}" for option in options_for(name, program.options))
    return f"get_strategy({name!r}{more})"


def owned(program: Program, which: int) -> str:
    """Write an optimizer after its module, as arguments."""
    return f"{MODULES[program.optimizers[which].module]}, {OPTIMIZERS[which]}"


def grouped(program: Program, module: int) -> str:
    """Write the list of what is in the groups of a module's optimizers."""
    own = [OPTIMIZERS[number] for number, spec in enumerate(program.optimizers) if spec.module == module]
    return f"[each for owner in [{', '.join(own)}] for group in owner.param_groups for each in group['params']]"


def added_group(operation: ops.AddGroup, program: Program) -> str:
    """Write the call that adds to an optimizer the part it was made without."""
    spec = program.optimizers[operation.optimizer]
    parameters = f"list(strategy.unwrap({MODULES[spec.module]}).parts[{spec.without!r}].parameters())"
    group = f'{{"params": {parameters}, "lr": {operation.rate}, "weight_decay": {operation.decay}}}'
    return f"{OPTIMIZERS[operation.optimizer]}.add_param_group({group})"


def states_of(names: Sequence[str]) -> str:
    """Write the dict of all that is saved or loaded."""
    return "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"


def shown_state(program: Program) -> str:
    """Write the call that shows every module and every optimizer."""
    modules, optimizers = MODULES[: len(program.models)], OPTIMIZERS[: len(program.optimizers)]
    return f"state(strategy, [{', '.join(modules)}], [{', '.join(optimizers)}])"
