"""What is drawn: legal, again the same, and everything there is."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.grammar import draw, legal
from shard_core.testing.programs.parts import PARTS
from shard_core.testing.programs.program import ModelSpec, OptimizerSpec, Program, segments, share_of
from shard_core.testing.programs.settings import COMPILED, GIVEN, KINDS, PRECISIONS, TAKES, offered
from shard_core.testing.programs.vocabulary import KINDS as OPERATIONS
from shard_core.testing.programs.vocabulary import WAYS

PLAIN = Program(seed=0, strategy="ddp", models=(ModelSpec(parts=("linear",)),), optimizers=(OptimizerSpec(),))
BACKWARD = ops.Backward(key=1, rows=(2, 2))


@pytest.fixture(scope="module")
def drawn():
    return [draw(seed, "ddp", others=("fsdp",)) for seed in range(500)]


def kinds_of(program):
    return [type(each).__name__ for each in program.operations]


def test_programs_are_legal(drawn):
    assert all(map(legal, drawn))


def test_a_seed_draws_one_program(drawn):
    assert [draw(seed, "ddp", others=("fsdp",)) for seed in range(20)] == drawn[:20]
    assert draw(0, "single") != draw(1, "single")


def test_everything_is_drawn(drawn):
    assert {kind for program in drawn for kind in kinds_of(program)} == OPERATIONS.keys() - {"Attempt"}
    ways = {(type(each), each.how) for program in drawn for each in program.operations if type(each) in WAYS}
    elsewhere = {(ops.Fail, "layer")}  # which ddp promises to train
    assert ways == {(kind, how) for kind, hows in WAYS.items() for how in hows} - elsewhere
    assert {part for program in drawn for model in program.models for part in model.parts} == set(PARTS)
    assert {each.kind for program in drawn for each in program.optimizers} == {*KINDS, *TAKES}
    assert {program.precision for program in drawn} == set(PRECISIONS)
    for flag in ("wrapped", "averaged", "apart", "warmed"):
        assert {getattr(program, flag) for program in drawn} == {False, True}
    assert {option for program in drawn for option in program.options} == set(offered("ddp"))


def test_what_other_ranks_do_not_use_is_drawn_where_the_first_is_alone(drawn):
    backwards = [each for program in drawn for each in program.operations if isinstance(each, ops.Backward)]
    assert {each.unused for each in backwards if each.alone} == {False, True}
    assert not any(each.unused for each in backwards if not each.alone)


def test_one_rank_may_be_started_without_a_launcher(drawn):
    assert {draw(seed, "ddp", world_size=1).unlaunched for seed in range(20)} == {False, True}
    assert not any(program.unlaunched for program in drawn)
    alone = dataclasses.replace(PLAIN, world_size=1, unlaunched=True)
    assert legal(alone)
    assert not legal(dataclasses.replace(alone, world_size=2))
    for given in GIVEN.values():  # which read what a launcher sets
        assert not legal(dataclasses.replace(alone, options=(given,), apart=True))


def test_an_option_is_drawn_where_it_acts():
    assert "sub_group_size=100" not in offered("ddp")
    assert {each.partition("=")[0] for each in offered("single")} == {"activation_checkpointing", "activation_offload"}


def test_an_option_that_nobody_wrote_here_is_illegal():
    assert legal(dataclasses.replace(PLAIN, options=("broadcast_buffers=False",)))
    assert not legal(dataclasses.replace(PLAIN, options=("broadcast_buffers=print()",)))


@pytest.mark.parametrize("option", [each for each in GIVEN.values() if "[model." in each])
def test_a_strategy_is_given_parts_of_a_model_that_needs_nothing_of_it(option):
    given = dataclasses.replace(PLAIN, options=(option,), apart=True)
    assert legal(given)
    assert not legal(dataclasses.replace(given, apart=False))  # whose weights its generator draws
    assert not legal(dataclasses.replace(given, wrapped=True))
    assert not legal(dataclasses.replace(given, models=(*given.models, *given.models)))
    again = ops.Switch(strategy="ddp")
    assert legal(dataclasses.replace(given, operations=(again,)))
    assert not legal(dataclasses.replace(given, operations=(dataclasses.replace(again, same=True),)))


def test_what_may_be_given_is_drawn_where_a_strategy_takes_it():
    fsdp = {option for seed in range(200) for option in draw(seed, "fsdp").options}
    assert set(GIVEN.values()) <= fsdp
    hsdp = {option for seed in range(200) for option in draw(seed, "hsdp").options}
    assert {GIVEN["ignored_modules"]} == hsdp & {GIVEN["ignored_modules"], GIVEN["device_mesh"]}
    assert all(program.apart for seed in range(200) if "[model." in str((program := draw(seed, "fsdp")).options))


def test_units_made_by_hand_have_complex_parameters_more_often():
    programs = [each for seed in range(600) if (each := draw(seed, "fsdp")).precision == "32-true"]
    turned = {
        wrapped: ["turned" in each.models[0].parts for each in programs if each.wrapped is wrapped]
        for wrapped in (False, True)
    }
    assert sum(turned[True]) / len(turned[True]) > 2 * sum(turned[False]) / len(turned[False])


def test_a_strategy_is_set_up_again():
    assert legal(dataclasses.replace(PLAIN, operations=(ops.Switch(strategy="ddp", same=True), BACKWARD)))


def test_a_module_may_have_no_optimizer():
    two = dataclasses.replace(PLAIN, models=(*PLAIN.models, *PLAIN.models))
    backward = dataclasses.replace(BACKWARD, module=1)
    assert legal(dataclasses.replace(two, operations=(backward, ops.ShowGradients(module=1), ops.Step())))
    assert not legal(dataclasses.replace(two, operations=(dataclasses.replace(backward, denominator=True),)))
    assert not legal(dataclasses.replace(two, precision="16-mixed"))


def test_a_precision_that_is_not_listed_is_illegal():
    assert not legal(dataclasses.replace(PLAIN, precision="16-true"))


def test_ranks_share_out_the_rows_of_each_batch():
    for seed in range(100):
        program = draw(seed, "ddp", sizes=(1, 3))
        sizes = iter(segments(program))
        now = next(sizes)
        for operation in program.operations:
            now = next(sizes) if getattr(operation, "world_size", 0) else now
            assert len(getattr(operation, "rows", range(now.world_size))) == now.world_size
        assert legal(program)


@pytest.mark.long
def test_a_program_goes_on_where_its_precision_is():
    drawn = [draw(seed, "ddp", others=("deepspeed_stage_1",)) for seed in range(900)]
    switches = {
        each.strategy
        for program in drawn
        if program.precision == "64-true"
        for each in program.operations
        if isinstance(each, ops.Switch)
    }
    assert switches == {"ddp"}


@pytest.mark.long
def test_models_are_compiled_rarely_and_where_the_strategy_takes_them():
    drawn = [draw(seed, "ddp", others=("deepspeed_stage_1", "fsdp")) for seed in range(1000)]
    compiled = [program for program in drawn if program.compiled]
    assert {program.compiled for program in compiled} == set(COMPILED)
    assert len(compiled) < 40
    switches = {each.strategy for program in compiled for each in program.operations if isinstance(each, ops.Switch)}
    assert "deepspeed_stage_1" not in switches
    assert not any(draw(seed, "deepspeed_stage_1").compiled for seed in range(300))


@pytest.mark.parametrize(
    ("compiled", "parts", "operations"),
    [
        ("sometime", ("linear",), ()),
        ("in place", ("counter",), ()),
        ("after", ("linear",), (dataclasses.replace(BACKWARD, how="retain_graph"),)),
        ("before", ("linear",), (ops.LoadStateDict(),)),
    ],
)
def test_what_torchs_compiler_does_not_do_is_illegal(compiled, parts, operations):
    program = dataclasses.replace(PLAIN, models=(ModelSpec(parts=parts),), operations=operations)
    assert legal(program)
    assert not legal(dataclasses.replace(program, compiled=compiled))


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizers": (OptimizerSpec(kind="adamw"),)},
        {"optimizers": (OptimizerSpec(weight_decay=0.05),)},
        {"optimizers": (OptimizerSpec(fused=True),)},
        {"optimizers": (OptimizerSpec(without="sparse"),)},
        {"precision": "16-mixed"},
        {"operations": (BACKWARD, ops.ClipNorm(max_norm=1.0))},
        {"operations": (BACKWARD, ops.ClipValue(value=1.0))},
    ],
)
def test_what_torch_does_not_do_with_sparse_gradients_is_illegal(fields):
    dense = dataclasses.replace(PLAIN, models=(ModelSpec(parts=("padded",)),))
    sparse = dataclasses.replace(PLAIN, models=(ModelSpec(parts=("sparse",)),))
    assert legal(sparse)
    assert not legal(dataclasses.replace(sparse, **fields))
    if "without" not in str(fields):
        fields = {**fields, "models": dense.models}
    assert legal(dataclasses.replace(dense, **fields)) or "sparse" in str(fields)


MUON, REST = OptimizerSpec(kind="muon"), OptimizerSpec(kind="adamw")


@pytest.mark.parametrize(
    ("optimizers", "is_legal"),
    [
        ((MUON, REST), True),
        ((REST, MUON), True),
        ((MUON,), False),
        ((MUON, MUON), False),
        ((dataclasses.replace(MUON, groups=2), REST), False),
        ((dataclasses.replace(MUON, foreach=True), REST), False),
    ],
)
def test_an_optimizer_of_matrices_has_one_of_the_rest_beside_it(optimizers, is_legal):
    program = dataclasses.replace(PLAIN, optimizers=optimizers)
    assert legal(program) is is_legal
    if is_legal:
        shares = {each.kind: share_of(program, each) for each in optimizers}
        assert shares == {"muon": "matrices", "adamw": "rest"}


def test_what_looks_at_whole_tensors_is_drawn_where_it_may():
    kinds = {each.kind for seed in range(300) for each in draw(seed, "deepspeed_stage_2").optimizers}
    assert "muon" not in kinds


def test_programs_are_long(drawn):
    lengths = sorted(len(program.operations) for program in drawn)
    assert lengths[len(lengths) // 2] >= 12


@pytest.mark.long
def test_nearly_every_operation_follows_every_other():
    pairs = set()
    for seed in range(2500):
        pairs.update(itertools.pairwise(kinds_of(draw(seed, "ddp", others=("fsdp",)))))
    assert len(pairs) >= 0.95 * (len(OPERATIONS) - 1) ** 2


def test_one_strategy_goes_on_as_itself_alone():
    switches = [each for seed in range(100) for each in draw(seed, "ddp").operations if isinstance(each, ops.Switch)]
    assert {each.strategy for each in switches} <= {"ddp"}


def test_programs_for_a_device_have_what_a_cpus_oracle_can_follow():
    drawn = [draw(seed, "ddp", device="cuda") for seed in range(100)]
    assert all(program.device == "cuda" and legal(program) for program in drawn)
    assert {program.precision for program in drawn} == {"32-true"}
    kinds = {type(each) for program in drawn for each in program.operations}
    assert kinds.isdisjoint({ops.HookGradients, ops.Initialize})
    assert not any(spec.fused and spec.kind == "adagrad" for program in drawn for spec in program.optimizers)
    assert any(spec.fused for program in drawn for spec in program.optimizers)
