"""Programs that once failed do not fail again."""

from __future__ import annotations

import pytest

from shard_core import plugins
from shard_core.testing.programs.judgement import judge
from shard_core.testing.programs.kept import kept_programs
from shard_core.testing.programs.program import strategies_of

KEPT = kept_programs()
HERE = {each.name for each in plugins.installed() if each.problem is None}


@pytest.mark.long  # of which campaigns judge those of their strategy first, in every run
@pytest.mark.parametrize("name", [name for name, each in KEPT.items() if strategies_of(each) <= HERE])
def test_is_right_now(name, worlds):
    program = KEPT[name]
    judgement = judge(program, worlds)
    assert judgement.verdict == ("refused" if name.startswith("refused-") else "equal"), judgement.text


def test_there_are_some():
    assert "seed-again" in KEPT
