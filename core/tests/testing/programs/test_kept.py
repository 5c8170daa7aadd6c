"""Programs that once failed do not fail again."""

from __future__ import annotations

import pytest

from shard_core import plugins
from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.judgement import judge
from shard_core.testing.programs.kept import kept_programs

KEPT = kept_programs()
HERE = {each.name for each in plugins.installed() if each.problem is None}


def needed(program):
    return {program.strategy} | {each.strategy for each in program.operations if isinstance(each, ops.Switch)}


def when(program):
    """Return the marks of a program: every run judges all by campaigns, but for those of a strategy that has none."""
    return [] if program.strategy == "deepspeed" else [pytest.mark.long]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=when(each)) for name, each in KEPT.items() if needed(each) <= HERE]
)
def test_is_right_now(name, worlds):
    program = KEPT[name]
    judgement = judge(program, worlds)
    assert judgement.verdict == ("refused" if name.startswith("refused-") else "equal"), judgement.text


def test_there_are_some():
    assert "seed-again" in KEPT
