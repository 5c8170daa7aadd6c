"""Programs as data: what JSON keeps of them, and which JSON is none."""

from __future__ import annotations

import dataclasses
import json

import pytest

from shard_core.errors import InvalidOption
from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.grammar import draw
from shard_core.testing.programs.program import ModelSpec, OptimizerSpec, Program, from_json

PROGRAM = Program(
    seed=1,
    strategy="ddp",
    models=(ModelSpec(parts=("linear",)),),
    optimizers=(OptimizerSpec(),),
    operations=(ops.Backward(key=1, rows=(2, 2)), ops.ClipNorm(max_norm=1.0), ops.Step()),
)


def changed(**fields):
    return json.dumps({**json.loads(PROGRAM.to_json()), **fields})


def test_json_keeps_all_of_a_program():
    for seed in range(200):
        program = draw(seed, "ddp", others=("single",))
        assert from_json(program.to_json()) == program


def test_json_keeps_what_was_attempted():
    attempt = ops.Attempt(refused=ops.Backward(key=3, rows=(2, 1), deferred=True))
    program = dataclasses.replace(PROGRAM, operations=(attempt, *PROGRAM.operations))
    assert from_json(program.to_json()) == program
    with pytest.raises(InvalidOption, match="did you mean 'Step'"):
        from_json(changed(operations=[{"operation": "Attempt", "refused": {"operation": "Stepp"}}]))


def test_json_keeps_an_infinite_norm():
    program = Program(
        seed=0,
        strategy="ddp",
        models=PROGRAM.models,
        optimizers=PROGRAM.optimizers,
        operations=(ops.ClipNorm(max_norm=1.0, norm_type=float("inf")),),
    )
    assert from_json(program.to_json()) == program


def test_defaults_may_be_left_out():
    text = '{"seed": 3, "strategy": "fsdp", "operations": [{"operation": "Step"}]}'
    assert from_json(text) == Program(
        seed=3, strategy="fsdp", models=(), optimizers=(), operations=(ops.Step(optimizer=0),)
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "this is none"),
        ("", "this is none"),
        ("[]", "a program is a JSON object, not list"),
        (changed(operations={}), "models, optimizers and operations are lists"),
        (changed(operations=[{"operation": "Stop"}]), "did you mean 'Step'?"),
        (changed(operations=["Step"]), "'Step' is no operation"),
        (changed(operations=[{"operation": "Step", "optimiser": 0}]), "Step has no field 'optimiser'"),
        (changed(operations=[{"operation": "Step", "optimizer": "0"}]), "Step has no field 'optimizer' that takes '0'"),
        (changed(operations=[{"operation": "Step", "optimizer": True}]), "that takes True"),
        (changed(operations=[{"operation": "Backward", "key": 1, "rows": [2, "2"]}]), "Backward has no field 'rows'"),
        (
            changed(operations=[{"operation": "Reduce", "key": 1, "how": "men"}]),
            "Reduce has no how='men'; did you mean",
        ),
        (changed(operations=[{"operation": "Backward"}]), "Backward is written with the fields"),
        (changed(models=["linear"]), "ModelSpec is written as a JSON object"),
        (changed(optimizers=[{"groups": 1.5}]), "OptimizerSpec has no field 'groups' that takes 1.5"),
        (changed(strategy=None), "Program has no field 'strategy' that takes None"),
        (changed(colour="red"), "Program has no field 'colour'"),
    ],
)
def test_what_is_no_program_is_refused(text, says):
    with pytest.raises(InvalidOption) as refusal:
        from_json(text)
    assert says in str(refusal.value)
