"""What plain PyTorch, with what the contract adds to it, allows after what a program has done so far."""

from __future__ import annotations

import dataclasses

import pytest

from shard_core import plugins
from shard_core.capability import Capability
from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.grammar import legal
from shard_core.testing.programs.program import ModelSpec, OptimizerSpec, Program

PLAIN = Program(seed=0, strategy="ddp", models=(ModelSpec(parts=("linear",)),), optimizers=(OptimizerSpec(),))
BACKWARD = ops.Backward(key=1, rows=(2, 2))
DEFERRED = dataclasses.replace(BACKWARD, deferred=True)
COUNTED = dataclasses.replace(BACKWARD, denominator=True)
LOOSE = ops.ClipNorm(max_norm=1.0, finite=False)
SCALED = dataclasses.replace(PLAIN, precision="16-mixed")
THROUGH = dataclasses.replace(BACKWARD, how="through")


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


def test_momentum_is_not_forgotten_where_torchs_fused_kernel_wants_that_of_all() -> None:
    forgets = dataclasses.replace(PLAIN, operations=(ops.Initialize(which=0, forgets=True),))
    for fused in (False, True):
        optimizers = (OptimizerSpec(kind="momentum", fused=fused),)
        assert legal(dataclasses.replace(forgets, optimizers=optimizers)) is not fused
    assert legal(dataclasses.replace(forgets, optimizers=(OptimizerSpec(kind="adamw", fused=True),)))


def test_a_layer_is_not_frozen_where_its_activations_are_computed_again():
    frozen = dataclasses.replace(PLAIN, operations=(dataclasses.replace(BACKWARD, how="frozen"),))
    assert legal(frozen)
    assert not legal(dataclasses.replace(frozen, options=("activation_checkpointing=torch.nn.Linear",)))


@pytest.mark.parametrize(
    ("how", "parts", "precision"),
    [
        ("penalty", ("attention",), "32-true"),
        ("penalty", ("linear",), "16-mixed"),
        ("slopes", ("attention",), "32-true"),
        ("slopes by hand", ("linear",), "16-mixed"),
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
        (dataclasses.replace(COUNTED, how="slopes"),),
        (dataclasses.replace(BACKWARD, extra=True, unused=True),),
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
