"""Programs that fail are cut down to what fails."""

from __future__ import annotations

import dataclasses

import pytest

from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.grammar import draw, legal
from shard_core.testing.programs.judgement import Judgement
from shard_core.testing.programs.shrinking import shrink


def finds_a_step_after_changed_weights(program):
    changed = False
    for at, operation in enumerate(program.operations):
        changed = changed or isinstance(operation, ops.EditWeights)
        if changed and isinstance(operation, ops.Step):
            return Judgement(verdict="defect", at=at, symptom="Step weights")
    return Judgement(verdict="equal")


def failing(count):
    """Draw some programs of one model that the judge finds at fault."""
    drawn = (draw(seed, "ddp", others=("single",)) for seed in range(1000))
    drawn = (program for program in drawn if len(program.models) == 1)
    found = (program for program in drawn if finds_a_step_after_changed_weights(program).verdict == "defect")
    return [next(found) for _ in range(count)]


@pytest.mark.parametrize("number", [0, 1, *(pytest.param(number, marks=pytest.mark.long) for number in (2, 3, 4))])
def test_two_operations_and_nothing_else_remain(number):
    program = failing(5)[number]
    smaller, judgement = shrink(
        program, finds_a_step_after_changed_weights(program), finds_a_step_after_changed_weights
    )
    assert [type(each) for each in smaller.operations] == [ops.EditWeights, ops.Step]
    assert (judgement.at, judgement.symptom) == (1, "Step weights")
    assert [model.parts for model in smaller.models] == [()]
    assert [model.output for model in smaller.models] == ["tensor"]
    assert len(smaller.optimizers) == 1
    assert (smaller.optimizers[0].kind, smaller.late, legal(smaller)) == ("sgd", False, True)


def test_only_the_same_symptom_counts():
    def judge(program):
        kinds = [type(each) for each in program.operations]
        if kinds.count(ops.Backward) >= 2:
            return Judgement(verdict="defect", at=len(kinds) - 1, symptom="two")
        return Judgement(verdict="defect", at=0, symptom="less")

    program = next(each for each in (draw(seed, "ddp") for seed in range(50)) if judge(each).symptom == "two")
    smaller, judgement = shrink(program, judge(program), judge)
    assert [type(each) for each in smaller.operations] == [ops.Backward] * 2
    assert judgement.symptom == "two"


def test_illegal_programs_are_never_judged():
    judged = []

    def judge(program):
        judged.append(program)
        return finds_a_step_after_changed_weights(program)

    program = failing(1)[0]
    shrink(program, finds_a_step_after_changed_weights(program), judge)
    assert all(map(legal, judged))


def test_without_time_a_program_stays():
    program = failing(1)[0]
    found = finds_a_step_after_changed_weights(program)
    smaller, judgement = shrink(program, found, finds_a_step_after_changed_weights, seconds=0.0)
    assert judgement == found
    assert len(smaller.operations) in (found.at + 1, len(program.operations))


def test_what_need_not_be_compiled_is_not_from_the_first_candidate_on():
    judged = []

    def judge(program):
        judged.append(program)
        return finds_a_step_after_changed_weights(program)

    program = dataclasses.replace(failing(1)[0], compiled="after")
    smaller, _ = shrink(program, finds_a_step_after_changed_weights(program), judge)
    assert [each.compiled for each in judged].count("after") <= 1
    assert smaller.compiled == ""
