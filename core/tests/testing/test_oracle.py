from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist

from shard_core.testing import models, oracle
from shard_core.testing.oracle import Trajectory, assert_same, assert_same_numbers, assert_same_weights

_STEPS = 20
_GLOBAL_BATCH = 12


def _oracle(name, optimizer, **options):
    micro_batches = models.batches(name, _STEPS * options.get("accumulate", 1), _GLOBAL_BATCH)
    return oracle.train(partial(models.make, name), partial(models.make_optimizer, optimizer), micro_batches, **options)


def _by_hand(name, optimizer_name, accumulate, clip, divide):
    """Train data parallel with nothing but all-reduce, so that the bounds are measured against a right run."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = models.make(name)
    optimizer = models.make_optimizer(optimizer_name, model)
    micro_batches = models.batches(name, _STEPS * accumulate, _GLOBAL_BATCH)
    losses, norms = [], []
    for start in range(0, len(micro_batches), accumulate):
        total = torch.zeros(())
        for batch in micro_batches[start : start + accumulate]:
            loss = model(*models.share(batch, rank, world_size)) / accumulate
            loss.backward()
            total += loss.detach()
        for tensor in [total, *(p.grad for p in model.parameters() if p.grad is not None)]:
            dist.all_reduce(tensor)
            tensor /= world_size if divide or tensor is total else 1
        losses.append(total.item())
        limit = math.inf if clip is None else clip
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trajectory(losses=losses, norms=norms, weights=model.state_dict())


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("optimizer", models.OPTIMIZERS)
@pytest.mark.parametrize("name", models.NAMES)
def test_a_right_run_is_within_the_bounds(worlds, name, optimizer, world_size):
    expected = _oracle(name, optimizer)
    for actual in worlds(world_size).run(_by_hand, name, optimizer, 1, None, True):
        assert_same(actual, expected, elementwise=optimizer == "sgd")


@pytest.mark.parametrize("optimizer", models.OPTIMIZERS)
def test_a_right_run_with_accumulation_and_clipping_is_within_the_bounds(worlds, optimizer):
    expected = _oracle("gpt", optimizer, accumulate=4, clip=0.1)
    assert min(expected.norms) > 0.1, "nothing was clipped"
    for actual in worlds(2).run(_by_hand, "gpt", optimizer, 4, 0.1, True):
        assert_same(actual, expected, elementwise=optimizer == "sgd")


@pytest.mark.parametrize("optimizer", models.OPTIMIZERS)
def test_a_gradient_summed_instead_of_averaged_is_caught(worlds, optimizer):
    expected = _oracle("plain", optimizer)
    for actual in worlds(2).run(_by_hand, "plain", optimizer, 1, None, False):
        with pytest.raises(AssertionError, match="gradient norm of step 0"):
            assert_same(dataclasses.replace(actual, losses=expected.losses), expected)


def test_accumulating_equals_one_batch_of_all_the_samples():
    parts = models.batches("plain", 8, 6)
    whole = [tuple(map(torch.cat, zip(*parts[i : i + 4], strict=True))) for i in (0, 4)]
    make, optimizer = partial(models.make, "plain"), partial(models.make_optimizer, "sgd")
    assert_same(oracle.train(make, optimizer, parts, accumulate=4), oracle.train(make, optimizer, whole))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_is_the_one_before_clipping(norm_type):
    free = _oracle("plain", "sgd", norm_type=norm_type)
    clipped = _oracle("plain", "sgd", norm_type=norm_type, clip=0.01)
    assert clipped.norms[0] == free.norms[0] > 0.01
    with pytest.raises(AssertionError):
        assert_same_weights(clipped.weights, free.weights, 1e-5)


def test_autocast_changes_the_run_and_keeps_float32_weights():
    expected = _oracle("gpt", "adamw")
    mixed = _oracle("gpt", "adamw", autocast_dtype=torch.bfloat16)
    assert_same_numbers("loss", mixed.losses, expected.losses, 2e-3)
    with pytest.raises(AssertionError):
        assert_same_numbers("loss", mixed.losses, expected.losses, 1e-6)
    assert {tensor.dtype for tensor in mixed.weights.values()} == {torch.float32}


def test_the_seed_decides_the_weights():
    run = partial(oracle.train, partial(models.make, "plain"), partial(models.make_optimizer, "sgd"), [])
    assert_same_weights(run(seed=1).weights, run(seed=1).weights, 0.0)
    with pytest.raises(AssertionError, match=r"'first.weight' is the first"):
        assert_same_weights(run(seed=1).weights, run(seed=2).weights, 1e-5)


def test_a_tied_weight_stands_under_both_names_and_its_state_under_the_first():
    run = _oracle("gpt", "adamw")
    assert_same_weights({"w": run.weights["head.weight"]}, {"w": run.weights["embedding.weight"]}, 0.0)
    assert run.optimizer_state["embedding.weight"]["step"] == _STEPS
    assert "head.weight" not in run.optimizer_state


_WEIGHTS = {
    "first": torch.tensor([1.0, 2.0, 3.0]),
    "second": torch.tensor([[4.0, 0.0]]),
    "calls": torch.tensor(1_000_000),
}


def _changed(name, index, value):
    weights = {key: tensor.clone() for key, tensor in _WEIGHTS.items()}
    weights[name][index] = value
    return weights


def test_the_first_differing_parameter_is_named_with_its_worst_element():
    with pytest.raises(
        AssertionError, match=r"'second' .* by 2.5e-01 relative, .* element 1: 1.0, the oracle's is 0.0"
    ):
        assert_same_weights(_changed("second", (0, 1), 1.0), _WEIGHTS, 1e-5)


@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.5])
def test_no_wrong_value_passes(value, elementwise):
    with pytest.raises(AssertionError, match="'first'"):
        assert_same_weights(_changed("first", 0, value), _WEIGHTS, 1e-5, elementwise=elementwise)


def test_elementwise_is_stricter_than_the_whole_model():
    weights = {"large": torch.full((1000,), 100.0), "small": torch.tensor([0.001])}
    nudged = {**weights, "small": torch.tensor([0.0011])}
    assert_same_weights(nudged, weights, 1e-5)
    with pytest.raises(AssertionError, match="'small'"):
        assert_same_weights(nudged, weights, 1e-5, elementwise=True)


def test_a_bound_of_zero_asks_for_equal_bits():
    assert_same_weights(_WEIGHTS, _WEIGHTS, 0.0)
    nudged = _changed("first", 1, math.nextafter(2.0, 3.0) + 2e-7)
    with pytest.raises(AssertionError, match="'first'"):
        assert_same_weights(nudged, _WEIGHTS, 0.0)


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        ({name: _WEIGHTS[name] for name in ("first", "calls")}, r"missing \['second'\]"),
        ({**_WEIGHTS, "third": torch.ones(1)}, r"not the oracle's \['third'\]"),
        ({**_WEIGHTS, "second": torch.ones(2)}, r"'second' is torch.float32 \(2,\), .* \(1, 2\)"),
        ({**_WEIGHTS, "first": _WEIGHTS["first"].double()}, "'first' is torch.float64"),
        ({**_WEIGHTS, "calls": torch.tensor(1_000_001)}, "'calls' is 1000001, the oracle's is 1000000"),
    ],
)
def test_names_shapes_dtypes_and_integers_must_agree(actual, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_weights(actual, _WEIGHTS, 1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.00001, 0.0])
def test_no_wrong_number_passes(value):
    with pytest.raises(AssertionError, match="loss of step 1"):
        assert_same_numbers("loss", [1.0, value], [1.0, 1.0], 1e-6)


def test_a_missing_step_is_noticed():
    with pytest.raises(AssertionError, match="loss has 1 steps, the oracle's has 2"):
        assert_same_numbers("loss", [1.0], [1.0, 1.0], 1e-6)


def test_the_oracle_reaches_nothing_of_ours():
    program = (
        "import runpy, sys\n"
        f"runpy.run_path({oracle.__file__!r})\n"
        "sys.exit([name for name in sys.modules if name.partition('.')[0].startswith('shard')] or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_distance_is_what_the_bounds_are_held_against():
    truth = Trajectory(
        losses=[2.0, 1.0], norms=[4.0, 0.0], weights={"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    )
    mine = Trajectory(losses=[2.0, 1.5], norms=[5.0, 0.1], weights={"a": torch.tensor([3.0]), "b": torch.tensor([5.0])})
    assert oracle.distance(truth, truth) == oracle.Distance(loss=0.0, norm=0.0, weights=0.0)
    assert oracle.distance(mine, truth) == oracle.Distance(loss=0.5, norm=0.25, weights=0.2)
    with pytest.raises(AssertionError, match="missing"):
        oracle.distance(dataclasses.replace(mine, weights={}), truth)


def test_loss_can_be_made_of_a_batch_of_any_shape():
    batches = models.batches("plain", 2, _GLOBAL_BATCH)
    make, make_optimizer = partial(models.make, "plain"), partial(models.make_optimizer, "sgd")
    named = [{"inputs": inputs, "targets": targets} for inputs, targets in batches]
    made = oracle.train(make, make_optimizer, named, loss_of=lambda model, batch: model(**batch))
    assert made.losses == oracle.train(make, make_optimizer, batches).losses
