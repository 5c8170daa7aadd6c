"""Programs as Python."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import re
import subprocess
import sys

import pytest
import torch

from shard_core import plugins
from shard_core.errors import CheckpointError
from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.grammar import draw, legal
from shard_core.testing.programs.kept import kept_programs
from shard_core.testing.programs.observation import fails
from shard_core.testing.programs.program import ModelSpec, OptimizerSpec, segments
from shard_core.testing.programs.settings import COMPILED, GIVEN
from shard_core.testing.programs.writing.failures import failure
from shard_core.testing.programs.writing.script import script_of


def shown(text):
    """List the numbers of the operations that a script shows, in order."""
    return [int(number) for number in re.findall(r"^    show\((-?\d+)", text, re.MULTILINE)]


@pytest.mark.parametrize("strategy", ["ddp", "single"])
def test_scripts_compile_and_show_each_operation_once(strategy):
    for seed in range(100 if strategy == "ddp" else 30):
        program = draw(seed, strategy, others=("fsdp",) if strategy == "ddp" else ())
        text = script_of(program)
        compile(text, "script", "exec")
        assert shown(text) == list(range(-1, len(program.operations)))


def test_each_number_of_ranks_has_a_function_of_its_own():
    for seed in range(100):
        program = draw(seed, "ddp", others=("fsdp",), sizes=(1, 2, 3))
        text = script_of(program)
        assert shown(text) == list(range(-1, len(program.operations)))
        entries = [each.name for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)]
        assert entries == ["build", *(each.entry for each in segments(program))]


def test_a_model_whose_parts_a_strategy_is_given_is_made_before_it():
    plain = draw(0, "fsdp")
    again = ops.Switch(strategy="fsdp", world_size=3)
    given = dataclasses.replace(plain, options=(GIVEN["ignored_modules"],), apart=True, operations=(again,))
    model = dataclasses.replace(given, models=given.models[:1], optimizers=(OptimizerSpec(),), averaged=False)
    text = script_of(model)
    for function in ast.parse(text).body:
        if isinstance(function, ast.FunctionDef) and function.name != "build":
            lines = ast.unparse(function)
            made = [lines.index(each) for each in ("model = Model(", "get_strategy(", "build(strategy, model)")]
            assert made == sorted(made)
    assert text.count("Model(") == 2
    assert text.index("import os\n") < text.index("import torch\n")


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_script_runs_on_the_numbers_of_ranks_that_it_says(tmp_path):
    drawn = (draw(seed, "ddp", sizes=(1, 2)) for seed in range(100))
    program = next(each for each in drawn if len(segments(each)) == 2 and not each.compiled)
    text = script_of(program)
    (tmp_path / "program.py").write_text(text)
    ((commands),) = re.findall(r"^if __name__ == \"__main__\":  # (.*)$", text, re.MULTILINE)
    for command in commands.split(", then "):
        words = command.replace("this_file.py", "program.py").split()
        assert words.pop(0) == "shard"
        subprocess.run([sys.executable, "-m", "shard_core", *words], cwd=tmp_path, check=True, timeout=60)


@pytest.mark.parametrize(
    ("strategy", "option"), [("hsdp", "device_mesh=('auto', 2)"), ("tp", "tensor_parallel_size=2")]
)
def test_four_ranks_are_two_times_two(strategy, option):
    for seed in range(10):
        assert f"get_strategy({strategy!r}" in script_of(draw(seed, strategy, world_size=4))
        assert option in script_of(draw(seed, strategy, world_size=4))


def test_a_model_without_parts_compiles():
    compile(script_of(dataclasses.replace(draw(0, "ddp"), models=(ModelSpec(parts=()),))), "script", "exec")


def test_a_script_uses_only_what_it_imports():
    for seed in range(100):
        tree = ast.parse(script_of(draw(seed, "ddp", others=("fsdp",), sizes=(1, 3))))
        stored = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        stored |= {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}
        stored |= {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
        imports = [each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom)]
        stored |= {name.name for each in imports for name in each.names}
        used = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
        assert used - stored <= {*dir(builtins), "__name__"}


def test_a_script_without_a_launcher_says_so():
    alone = dataclasses.replace(draw(0, "ddp", world_size=1), unlaunched=True)
    text = script_of(alone)
    assert "  # python this_file.py\n" in text
    assert text.index("    unlaunched()\n") < text.index("get_strategy(")
    assert "unlaunched" not in script_of(dataclasses.replace(alone, unlaunched=False))


def test_other_ranks_may_call_a_block_and_not_use_it():
    alone = ops.Backward(key=1, rows=(2, 2), extra=True, alone=True)
    program = dataclasses.replace(draw(0, "ddp"), models=(ModelSpec(parts=("extra",)),))
    for backward, arguments in (
        (alone, "extra=rank == 0"),
        (dataclasses.replace(alone, unused=True), "extra=True, unused=rank > 0"),
    ):
        assert f"model(given, {arguments})" in script_of(dataclasses.replace(program, operations=(backward,)))


@pytest.mark.parametrize("theirs", [3, 2])
def test_steps_until_a_failure_is_heard_of_are_as_many_on_all_ranks(theirs):
    taken = []

    class Stepping:
        def save_checkpoint(self, *_, **__):
            taken.clear()

        def optimizer_step(self, _):
            if len(taken) == 3:
                raise CheckpointError("the save has failed")
            taken.append(1)

        def all_gather(self, mine):
            return torch.stack([mine, torch.full_like(mine, theirs)])

    lines = failure(ops.Fail(how="steps"), dataclasses.replace(draw(0, "ddp"), models=()), 0, "")[1:]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    names = dict.fromkeys(("model", "second", "scheduler", "second_scheduler", "average", "critic", "stubborn"))
    names |= {"strategy": Stepping(), "optimizer": optimizer, "fails": fails, "torch": torch, "folder": ""}
    exec("\n".join(lines), names)
    assert names["failed"] is (theirs == 3)


def test_the_reason_is_its_docstring():
    tree = ast.parse(script_of(draw(0, "ddp"), "Seed 0: a step differs."))
    assert ast.get_docstring(tree) == "Seed 0: a step differs."


def test_kept_programs_have_at_most_sixty_lines():
    here = {each.name for each in plugins.installed()}  # a script asks its strategy's card for what it takes
    for name, program in kept_programs().items():
        assert program.strategy not in here or len(script_of(program).splitlines()) <= 60, name


def test_precision_is_written_only_where_it_is_another():
    program = draw(0, "ddp")
    assert "precision" not in script_of(dataclasses.replace(program, precision="32-true"))
    assert "precision='64-true'" in script_of(dataclasses.replace(program, precision="64-true"))


@pytest.mark.parametrize("compiled", COMPILED)
def test_models_are_compiled_where_the_program_says(compiled):
    text = script_of(dataclasses.replace(draw(0, "ddp"), compiled=compiled))
    assert text.count("backend='aot_eager'") == 1
    assert (text.index("aot_eager") > text.index("setup_module")) is (compiled == "after")
    assert ("torch.compile(model" in text) is (compiled == "before")


def test_a_backward_comes_before_an_optimizer_that_is_set_up_after_it():
    late = dataclasses.replace(draw(1, "ddp"), models=(ModelSpec(parts=()),), optimizers=(OptimizerSpec(),), late=True)
    late = dataclasses.replace(late, compiled="", averaged=False, options=(), operations=(), precision="32-true")
    warmed = dataclasses.replace(late, warmed=True)
    assert legal(late)
    assert legal(warmed)
    assert not legal(dataclasses.replace(warmed, late=False))
    assert not legal(dataclasses.replace(warmed, precision="16-mixed"))
    assert not legal(dataclasses.replace(warmed, optimizers=(OptimizerSpec(), OptimizerSpec())))
    # Whose gradients wait for its denominators.
    assert not legal(dataclasses.replace(warmed, operations=(ops.Backward(key=1, rows=(2, 2)),)))
    text = script_of(warmed)
    assert text.index("strategy.backward") < text.index("setup_optimizer")
    assert "strategy.backward" not in script_of(late)
