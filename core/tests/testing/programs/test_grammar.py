"""What is drawn: legal, again the same, and everything there is."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from shard_core import plugins
from shard_core.capability import Capability
from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.grammar import draw, legal
from shard_core.testing.programs.parts import PARTS
from shard_core.testing.programs.program import ModelSpec, OptimizerSpec, Program, segments, share_of
from shard_core.testing.programs.settings import COMPILED, GIVEN, KINDS, PRECISIONS, TAKES, offered
from shard_core.testing.programs.vocabulary import KINDS as OPERATIONS
from shard_core.testing.programs.vocabulary import WAYS

PLAIN = Program(seed=0, strategy="ddp", models=(ModelSpec(parts=("linear",)),), optimizers=(OptimizerSpec(),))
BACKWARD = ops.Backward(key=1, rows=(2, 2))
DEFERRED = dataclasses.replace(BACKWARD, deferred=True)
COUNTED = dataclasses.replace(BACKWARD, denominator=True)
LOOSE = ops.ClipNorm(max_norm=1.0, finite=False)
THROUGH = dataclasses.replace(BACKWARD, how="through")


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


def test_an_option_is_drawn_where_it_acts():
    assert "sub_group_size=100" not in offered("ddp")
    assert {each.partition("=")[0] for each in offered("single")} == {"activation_checkpointing", "activation_offload"}


def test_an_option_that_nobody_wrote_here_is_illegal():
    assert legal(dataclasses.replace(PLAIN, options=("broadcast_buffers=False",)))
    assert not legal(dataclasses.replace(PLAIN, options=("broadcast_buffers=print()",)))


SCALED = dataclasses.replace(PLAIN, precision="16-mixed")


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


def test_changes_that_engines_cannot_see_are_illegal():
    method, edit = ops.Forward(key=1, how="method"), ops.EditWeights(which=0, factor=0.9, how="groups' data")
    trained = BACKWARD
    assert legal(dataclasses.replace(PLAIN, operations=(method, trained, edit)))
    assert legal(dataclasses.replace(PLAIN, operations=(method, dataclasses.replace(edit, how="groups"))))
    assert not legal(dataclasses.replace(PLAIN, operations=(method, edit)))
    clamped = dataclasses.replace(PLAIN, models=(ModelSpec(parts=("linear", "clamped")),))
    stopped, edit = ops.Forward(key=1, how="failed"), ops.EditWeights(which=0, factor=0.9, how="in place")
    assert legal(dataclasses.replace(clamped, operations=(stopped, edit)))
    assert not legal(dataclasses.replace(clamped, operations=(stopped, edit), compiled="after"))
    assert not legal(dataclasses.replace(clamped, operations=(stopped, dataclasses.replace(edit, how="groups"))))


def test_what_a_gradient_scaler_forbids_is_illegal():
    for operations in (
        (ops.Closure(key=1, rows=(2, 2)),),
        (BACKWARD, ops.ClipNorm(max_norm=1.0), BACKWARD),
        (BACKWARD, ops.Step(), BACKWARD),
        (ops.Save(), BACKWARD, ops.Load()),
    ):
        assert legal(dataclasses.replace(PLAIN, operations=operations))
        assert not legal(dataclasses.replace(SCALED, operations=operations))
    assert legal(dataclasses.replace(SCALED, operations=(BACKWARD, BACKWARD, ops.Step(), ops.ZeroGrad(), BACKWARD)))
    assert legal(dataclasses.replace(SCALED, operations=(BACKWARD, ops.Save(), ops.Step(), ops.Load())))


@pytest.mark.parametrize(
    "operations",
    [
        (ops.Load(),),
        (ops.Fail(how="load"),),
        (ops.Save(), ops.Switch(strategy="ddp"), ops.Load(how="latest")),
        (ops.LoadWeights(),),
        (BACKWARD, ops.EditGradients(how="infinite"), ops.Step()),
        (BACKWARD, ops.EditGradients(how="infinite"), ops.ClipNorm(max_norm=1.0)),
        (BACKWARD, ops.EditGradients(how="infinite"), LOOSE, ops.Closure(key=1, rows=(2, 2))),
    ],
)
def test_what_nobody_saved_and_what_is_no_number_is_not_gone_on_with(operations):
    assert not legal(dataclasses.replace(PLAIN, operations=operations))


def test_infinite_gradients_are_zeroed_before_a_step():
    infinite = (BACKWARD, ops.EditGradients(how="infinite"), LOOSE, ops.ShowGradients())
    for zeroed in (ops.ZeroGrad(), ops.ZeroByHand(set_to_none=False)):
        assert legal(dataclasses.replace(PLAIN, operations=(*infinite[:2], zeroed, BACKWARD, ops.Step())))
    assert legal(dataclasses.replace(PLAIN, operations=infinite))
    assert not legal(dataclasses.replace(SCALED, operations=infinite))


def test_a_layer_by_itself_is_tried_where_it_is_refused(monkeypatch):
    tried = dataclasses.replace(PLAIN, operations=(ops.Fail(how="layer"),))
    assert not legal(tried)
    card = plugins.find("ddp")
    without = dataclasses.replace(card, capabilities=card.capabilities - {Capability.ENTRY_METHODS})
    monkeypatch.setattr("shard_core.testing.programs.situation.plugins.find", lambda _: without)
    assert legal(tried)
    assert not legal(dataclasses.replace(tried, compiled="before"))


def test_steps_without_gradients_are_taken_where_nothing_waits_or_counts_them():
    steps = ops.Fail(how="steps")
    for before in ((), (BACKWARD,), (COUNTED,)):
        assert legal(dataclasses.replace(PLAIN, operations=(*before, steps, BACKWARD, ops.Step())))
    by_hand = ops.Forward(key=1, how="interrupted by hand")
    assert not any(legal(dataclasses.replace(PLAIN, operations=(each, steps))) for each in (DEFERRED, by_hand))
    assert not legal(dataclasses.replace(SCALED, operations=(steps,)))
    assert not legal(dataclasses.replace(PLAIN, optimizers=PLAIN.optimizers * 2, operations=(steps,)))


def test_state_begins_anew_where_it_has_the_shape_of_parameters():
    restarts = dataclasses.replace(PLAIN, operations=(ops.Initialize(which=0, restarts=True),))
    assert legal(restarts)
    assert not legal(dataclasses.replace(restarts, optimizers=(OptimizerSpec(kind="adafactor"),)))
    assert not legal(dataclasses.replace(restarts, options=("param_persistence_threshold=0",)))


def test_a_layer_is_not_frozen_where_its_activations_are_computed_again():
    frozen = dataclasses.replace(PLAIN, operations=(dataclasses.replace(BACKWARD, how="frozen"),))
    assert legal(frozen)
    assert not legal(dataclasses.replace(frozen, options=("activation_checkpointing=torch.nn.Linear",)))


@pytest.mark.parametrize(
    ("how", "parts", "precision"),
    [
        ("penalty", ("attention",), "32-true"),
        ("penalty", ("linear",), "16-mixed"),
        ("crossed", ("clamped",), "32-true"),
    ],
)
def test_what_torch_has_no_derivatives_for_is_illegal(how, parts, precision):
    backward = dataclasses.replace(BACKWARD, how=how)
    plain = dataclasses.replace(PLAIN, models=(ModelSpec(parts=("linear",)),), operations=(backward,))
    assert legal(plain)
    assert not legal(dataclasses.replace(plain, models=(ModelSpec(parts=parts),), precision=precision))


def test_weights_that_a_forward_writes_have_no_copies():
    clamped = dataclasses.replace(PLAIN, models=(ModelSpec(parts=("clamped",)),))
    assert legal(clamped)
    assert not legal(dataclasses.replace(clamped, averaged=True))
    assert not legal(dataclasses.replace(clamped, precision="bf16-true"))


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


@pytest.mark.parametrize(
    "operations",
    [
        (ops.Load(),),
        (DEFERRED, ops.Step()),
        (DEFERRED, ops.ShowGradients()),
        (BACKWARD, COUNTED),
        (COUNTED, BACKWARD),
        (COUNTED, ops.ClipValue(value=1.0), COUNTED),
        (BACKWARD, ops.ZeroByHand(set_to_none=False), COUNTED),
        (COUNTED, ops.ZeroByHand(set_to_none=False)),
        (ops.Switch(strategy="ddp", world_size=2),),
        (ops.Switch(strategy="ddp", world_size=3), BACKWARD),
        (dataclasses.replace(BACKWARD, rows=(2, 0)),),
        (dataclasses.replace(BACKWARD, how="contrastive", rows=(2, 3)),),
        (dataclasses.replace(COUNTED, how="contrastive"),),
        (THROUGH,),
        (ops.StepScheduler(),),
        (ops.AddGroup(),),
        (ops.UpdateAverage(),),
        (ops.ShowAverage(key=1),),
        (ops.Freeze(part="norm"),),
        (ops.HookGradients(part="norm"),),
        (dataclasses.replace(COUNTED, how="penalty"),),
        (ops.Switch(strategy="fsdp", same=True),),
        (ops.Switch(strategy="ddp", world_size=3, same=True),),
        (ops.Step(optimizer=1),),
        (ops.Forward(module=1, key=0),),
        (ops.ZeroGrad(of_module=True, which=1),),
    ],
)
def test_what_plain_pytorch_forbids_is_illegal(operations):
    assert not legal(dataclasses.replace(PLAIN, operations=operations))


@pytest.mark.parametrize(
    "operations",
    [
        (ops.Save(), ops.Step(), ops.Load()),
        (DEFERRED, BACKWARD, ops.Step()),
        (DEFERRED, ops.ZeroGrad(), COUNTED),
        (BACKWARD, ops.ZeroGrad(), COUNTED),
        (dataclasses.replace(COUNTED, rows=(2, 0)),),
        (ops.Step(), ops.ShowGradients()),
    ],
)
def test_odd_places_are_legal(operations):
    assert legal(dataclasses.replace(PLAIN, operations=operations))


LACKING = dataclasses.replace(PLAIN, optimizers=(OptimizerSpec(without="linear"),))


@pytest.mark.parametrize(
    ("operations", "is_legal"),
    [
        ((BACKWARD, ops.AddGroup(), ops.Step()), True),
        ((ops.AddGroup(), ops.Save(), ops.Load()), True),
        ((ops.AddGroup(), ops.Switch(strategy="ddp"), ops.Step()), True),
        ((ops.AddGroup(), ops.ZeroGrad(), COUNTED), True),
        ((ops.AddGroup(), ops.AddGroup()), False),
        ((ops.Save(), ops.AddGroup(), ops.Load()), False),
        ((COUNTED,), False),
        ((ops.AddGroup(), COUNTED), False),
    ],
)
def test_a_group_is_added_once(operations, is_legal):
    assert legal(dataclasses.replace(LACKING, operations=operations)) is is_legal


@pytest.mark.parametrize(
    "optimizers",
    [
        (OptimizerSpec(without="norm"),),
        (OptimizerSpec(kind="adagrad", without="linear"),),
        (OptimizerSpec(without="linear"), OptimizerSpec()),
    ],
)
def test_an_optimizer_is_made_without_a_part_of_a_module_of_its_own(optimizers):
    assert not legal(dataclasses.replace(PLAIN, optimizers=optimizers))


@pytest.mark.parametrize(
    ("operations", "is_legal"),
    [
        ((THROUGH, ops.Step(optimizer=1), ops.Step()), True),
        ((dataclasses.replace(COUNTED, module=1), THROUGH), False),
        ((dataclasses.replace(THROUGH, deferred=True), BACKWARD, ops.Step()), True),
        ((dataclasses.replace(THROUGH, deferred=True), BACKWARD, ops.Step(optimizer=1)), True),
        ((dataclasses.replace(THROUGH, deferred=True), ops.Step()), False),
        ((dataclasses.replace(THROUGH, deferred=True), ops.Fail(how="step")), True),
        ((dataclasses.replace(THROUGH, deferred=True), ops.Fail(how="step", optimizer=1)), False),
        ((dataclasses.replace(DEFERRED, module=1), THROUGH, ops.Step(optimizer=1)), True),
    ],
)
def test_a_loss_through_two_modules_is_pending_in_both(operations, is_legal):
    two = dataclasses.replace(PLAIN, models=PLAIN.models * 2, optimizers=(OptimizerSpec(), OptimizerSpec(module=1)))
    assert legal(dataclasses.replace(two, operations=operations)) is is_legal
