"""Programs as Python."""

from __future__ import annotations

import ast
import dataclasses
import re

import pytest

from shard_core import plugins
from shard_core.testing.programs.grammar import draw
from shard_core.testing.programs.kept import kept_programs
from shard_core.testing.programs.script import script_of


def shown(text):
    """List the numbers of the operations that a script shows, in order."""
    return [int(number) for number in re.findall(r"^    show\((-?\d+)", text, re.MULTILINE)]


@pytest.mark.parametrize("strategy", ["ddp", "single"])
def test_scripts_compile_and_show_each_operation_once(strategy):
    for seed in range(300 if strategy == "ddp" else 50):
        program = draw(seed, strategy, others=("fsdp",) if strategy == "ddp" else ())
        text = script_of(program)
        compile(text, "script", "exec")
        assert shown(text) == list(range(-1, len(program.operations)))


def test_a_script_uses_only_what_it_imports():
    for seed in range(100):
        tree = ast.parse(script_of(draw(seed, "ddp", others=("fsdp",))))
        stored = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        stored |= {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}
        stored |= {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
        imports = [each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom)]
        stored |= {name.name for each in imports for name in each.names}
        used = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
        assert used - stored <= {"print", "len", "list", "dict", "float", "__name__"}


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
