"""The judge overlooks no mistake that hides behind a refusal, behind rounding or beside the values it compares."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.attempts import after_refusal
from shard_core.testing.programs.campaign import campaign
from shard_core.testing.programs.judgement import judge
from shard_core.testing.programs.program import ModelSpec, OptimizerSpec, Program, from_json
from shard_core.testing.programs.writing.script import script_of

OPERATIONS = (
    *(ops.Backward(key=7, rows=(3, 3)), ops.ShowGradients(), ops.Step(), ops.ClipValue(value=1.0), ops.Save()),
    ops.Load(),
)
#: What each is found by: the operation, and what of it.
ROGUES = {
    "refuses_without_momentum": "changed ClipValue",
    "refuses_at_half_the_rate": "changed ClipValue",
    "refuses_without_gradients": "changed ClipValue",
    "refuses_once_frozen": "changed ClipValue",
    "refuses_seeded": "changed ClipValue",
    "refuses_in_many_words": "ranks disagree ClipValue",
    "rounds_float32": "ShowGradients gradients",
    "shows_doubles": "setup weights",
    "shows_weights_everywhere": "setup weights",
    "loses_checkpoints": "Load CheckpointNotFound",
    "holds_modules": "held after teardown",
}


@pytest.fixture
def rogues(site, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    entries = {
        "shard.strategies": dict.fromkeys(
            [*ROGUES, "refuses_everything", "refuses_to_clip", "steps_no_more_once_refused"], "silent.plugin"
        )
    }
    site.install("shard-silent", requires=("shard-core>=1,<2",), entries=entries)


@pytest.mark.parametrize("name", ROGUES)
def test_a_mistake_is_no_refusal_and_no_rounding(name, rogues, worlds):
    judgement = judge(program(name), worlds)
    assert (judgement.verdict, judgement.symptom) == ("defect", ROGUES[name]), judgement.text


@pytest.mark.parametrize("operation", [ops.ChangeLearningRate(), ops.StepScheduler()])
def test_a_learning_rate_that_the_user_has_changed_is_no_mistake(operation, rogues, worlds):
    judgement = judge(program("refuses_to_clip", *OPERATIONS[:3], operation, OPERATIONS[3]), worlds)
    assert (judgement.verdict, judgement.symptom) == ("refused", "ClipValue SetupError"), judgement.text


def test_a_program_goes_on_after_a_refusal(rogues, worlds):
    judgement = judge(program("steps_no_more_once_refused", *OPERATIONS, *OPERATIONS[:4]), worlds)
    assert (judgement.verdict, judgement.symptom, judgement.at) == ("defect", "Step weights", 8), judgement.text
    assert judgement.onward is not None
    kinds = [type(each).__name__ for each in judgement.onward.operations]
    assert kinds == ["Backward", "ShowGradients", "Step", "Attempt", *kinds[4:]]
    assert from_json(judgement.onward.to_json()) == judgement.onward
    assert "with refused():\n        strategy.clip_gradients_value(" in script_of(judgement.onward)


@pytest.mark.parametrize(
    ("parts", "operation", "goes_on"),
    [
        (("linear",), ops.Step(), True),
        (("linear",), ops.Backward(key=1, rows=(2, 2)), True),
        (("batch_norm",), ops.Backward(key=1, rows=(2, 2)), False),
        (("batch_norm",), ops.ShowGradients(), True),
        (("clamped",), ops.Forward(key=1), False),
        (("linear",), ops.Backward(key=1, rows=(2, 2), how="frozen"), False),
        (("linear",), ops.Save(), False),
    ],
)
def test_it_goes_on_where_it_is_known_how_things_stand(parts, operation, goes_on):
    refused = dataclasses.replace(program("ddp", operation), models=(ModelSpec(parts=parts),))
    onward = after_refusal(refused, 0)
    assert (onward is not None) is goes_on
    assert after_refusal(refused, -1) is None
    assert after_refusal(refused, 1) is None


def test_who_refuses_everything_is_not_passed(rogues, worlds):
    report = campaign("refuses_everything", count=4, others=(), worlds=worlds)
    assert (report.verdicts["refused"], report.defect) == (4, None)
    assert not report.passed


def program(strategy, *operations):
    return Program(
        seed=0,
        strategy=strategy,
        models=(ModelSpec(parts=("linear",)),),
        optimizers=(OptimizerSpec(kind="momentum", scheduled=True),),
        operations=operations or OPERATIONS,
    )
