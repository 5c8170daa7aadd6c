"""Mutants are the same for a seed, parse, and leave alone what says rather than computes; programs notice one."""

from __future__ import annotations

import ast

import mutants
import mutation
import pytest


def test_draws_are_the_seeds_and_larger_ones_begin_alike():
    assert mutation.drawn(40, 1) == mutation.drawn(60, 1)[:40]
    assert mutation.drawn(40, 1) != mutation.drawn(40, 2)


def test_mutants_parse_and_change_something():
    for mutant in mutation.drawn(100, 1):
        assert ast.dump(ast.parse(mutant.applied())) != ast.dump(ast.parse((mutation.ROOT / mutant.file).read_text()))


SOURCE = '''
"""Says 1 < 2."""
if TYPE_CHECKING:
    import x
def f(a: int = 3 + 4, b: tuple[1, 2] = ()) -> L[5]:
    """Say 1 < 2."""
    log.info("%s %s", a, 6)
    if a < 7:
        raise ValueError(f"{a + 8}")
    if a < 9:
        return max(a + 10, b)
def _check_sizes(a):
    return a + 13
'''


def test_equivalent_mutants_are_mutants_still():
    for (file, line, text), why in mutation.equivalent().items():
        assert why
        assert any(each.place == (file, line, text) for each in mutation.mutants_of(mutation.ROOT / file)), line


def test_files_that_are_left_out_are_there():
    for file in mutation.ELSEWHERE:
        assert any(file.startswith(place) for place in mutation.TARGETS)
        assert (mutation.ROOT / file).exists()


def test_what_says_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(SOURCE)
    found = {(each.operator, each.text) for each in mutation.mutants_of(tmp_path / "a.py")}
    assert found == {
        *(("arithmetic", "(3 - 4)"), ("constant", "4"), ("constant", "5"), ("comparison", "(a <= 9)")),
        *(("constant", "10"), ("returns None", "return None"), ("arithmetic", "(a - 10)"), ("constant", "11")),
    }


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_programs_notice_a_norm_that_is_not_clipped(tmp_path):
    file = mutation.ROOT / "core/src/shard_core/strategy/step.py"
    deleted = [each for each in mutation.mutants_of(file) if each.operator == "deleted"]
    mutant = next(each for each in deleted if "clip_norm(" in each.diff())
    known = mutants.originals(tmp_path / "originals.json", 12)
    line = mutants.judged(mutant, [each for each in known if mutants.reaches(each, mutant)][:20])
    assert line["verdict"] == "found"
    assert line["by"].startswith("ddp")
