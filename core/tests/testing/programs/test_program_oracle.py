"""The oracle of random programs against loops written by hand."""

from __future__ import annotations

import pytest
import torch

from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.model import Model, batch, loss_of
from shard_core.testing.programs.plain.oracle import Oracle
from shard_core.testing.programs.program import ModelSpec, OptimizerSpec, Program

SEED = 5


def oracle_of(*parts, ranks, precision="32-true", averaged=False, **optimizer):
    program = Program(
        seed=SEED,
        strategy="ddp",
        world_size=ranks,
        precision=precision,
        models=(ModelSpec(parts=parts),),
        optimizers=(OptimizerSpec(**optimizer),),
        averaged=averaged,
    )
    return Oracle(program, ranks, {"ddp": False})


def model_of(*parts):
    torch.manual_seed(SEED)
    return Model(*parts)


def assert_weights(oracle, model, **bounds):
    shown = {name: value for name, value in oracle.state().items() if name.startswith("weights.0.")}
    weights = {f"weights.0.{name}": value for name, value in model.state_dict().items()}
    assert shown.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(shown[name], value, **bounds)


@pytest.fixture(autouse=True)
def _own_generator():
    with torch.random.fork_rng():
        yield


def test_a_save_without_what_is_frozen_leaves_it_and_its_state():
    oracle = oracle_of("frozen", "linear", ranks=1, kind="adagrad")
    names = [name for name in oracle.state() if ".frozen.layer.weight" in name or "parts.linear.layer.weight" in name]
    oracle.play(ops.Save(frozen=False))
    saved = oracle.state()
    with torch.no_grad():
        for name, parameter in oracle.models[0].named_parameters():
            parameter.add_(1.0)
            oracle.optimizers[0].state[parameter]["sum"].fill_(3.0 if "frozen" in name else 2.0)
    changed = oracle.state()
    loaded = oracle.play(ops.Load())[0]
    assert {name.split(".")[-1] for name in names} == {"weight", "sum", "step"}
    for name in names:
        torch.testing.assert_close(loaded[name], (changed if ".frozen." in name else saved)[name], rtol=0, atol=0)


def test_what_trained_for_a_while_is_saved_although_it_is_frozen():
    oracle = oracle_of("frozen", ranks=1)
    oracle.play(ops.Freeze(part="frozen", trained=True))
    oracle.play(ops.Step())
    oracle.play(ops.Freeze(part="frozen"))
    oracle.play(ops.Save(frozen=False))
    saved = oracle.state()
    with torch.no_grad():
        for parameter in oracle.models[0].parameters():
            parameter.add_(1.0)
    for name, value in oracle.play(ops.Load())[0].items():
        assert name == "left" or torch.equal(torch.as_tensor(value), torch.as_tensor(saved[name])), name


def test_an_attempt_leaves_weights_and_no_gradients():
    oracle = oracle_of("linear", ranks=2)
    oracle.play(ops.Backward(key=3, rows=(2, 2), denominator=True))
    before = oracle.state()
    shown = oracle.play(ops.Attempt(refused=ops.Step()))[0]
    assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(before[name])) for name, value in shown.items())
    assert oracle.play(ops.ShowGradients())[0] == {"gradients": {}}


def test_one_rank_is_the_plain_loop():
    parts = ("linear", "norm", "batch_norm")
    oracle = oracle_of(*parts, ranks=1, kind="momentum", weight_decay=0.05)
    model = model_of(*parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.05)
    assert_weights(oracle, model, rtol=0, atol=0)
    for key in range(3):
        given = batch(key, 0, 3)
        loss = loss_of(model(given), given)
        loss.backward()
        (shown,) = oracle.play(ops.Backward(key=key, rows=(3,)))
        assert torch.equal(shown["loss"], loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        (shown,) = oracle.play(ops.ClipNorm(max_norm=0.1))
        assert torch.equal(shown["norm"], norm)
        optimizer.step()
        (shown,) = oracle.play(ops.Step())
        assert shown["stepped"] is True
        assert_weights(oracle, model, rtol=0, atol=0)
        moments = optimizer.state[model.head.weight]["momentum_buffer"]
        assert torch.equal(shown["state.0.head.weight.momentum_buffer"], moments)
        optimizer.zero_grad()
        oracle.play(ops.ZeroGrad())


def test_gradients_are_summed_over_micro_batches_and_averaged_over_ranks():
    oracle, model = oracle_of("linear", ranks=2), model_of("linear")
    for key, deferred in ((1, True), (2, False)):
        shown = oracle.play(ops.Backward(key=key, rows=(2, 2), deferred=deferred))
        for rank in range(2):
            given = batch(key, rank, 2)
            loss = loss_of(model(given), given)
            (loss / 2).backward()
            assert torch.equal(shown[rank]["loss"], loss)
    for shown in oracle.play(ops.ShowGradients()):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(shown["gradients"][name], parameter.grad)


def test_denominators_make_the_mean_over_all_rows():
    oracle, model = oracle_of("linear", ranks=2), model_of("linear")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rows = {1: (3, 1), 2: (2, 0)}
    losses = torch.zeros(())
    for key, counts in rows.items():
        oracle.play(ops.Backward(key=key, rows=counts, denominator=True))
        for rank, count in enumerate(counts):
            given = batch(key, rank, count)
            losses = losses + loss_of(model(given), given, "sum")
    (losses / sum(map(sum, rows.values()))).backward()
    shown = oracle.play(ops.ClipNorm(max_norm=1e9))
    torch.testing.assert_close(shown[0]["norm"], torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    oracle.play(ops.Step())
    optimizer.step()
    assert_weights(oracle, model)


def test_zeroed_gradients_take_their_denominators_along():
    oracle, model = oracle_of("linear", ranks=2), model_of("linear")
    oracle.play(ops.Backward(key=1, rows=(4, 4), denominator=True))
    oracle.play(ops.ZeroGrad(set_to_none=False))
    oracle.play(ops.Backward(key=2, rows=(1, 2), denominator=True))
    losses = [loss_of(model(batch(2, rank, rank + 1)), batch(2, rank, rank + 1), "sum") for rank in range(2)]
    (sum(losses) / 3).backward()
    shown = oracle.play(ops.ShowGradients())[0]["gradients"]
    torch.testing.assert_close(shown["head.weight"], model.head.weight.grad)


def test_gradients_dropped_before_a_backward_take_their_denominators_along():
    dropping, plain = (oracle_of("linear", ranks=2) for _ in range(2))
    dropping.play(ops.Backward(key=3, rows=(4, 3), denominator=True))
    for oracle, how in ((dropping, "dropped"), (plain, "plain")):
        oracle.play(ops.Backward(key=4, rows=(1, 0), denominator=True, how=how))
        oracle.play(ops.Step())
    assert_weights(dropping, plain.models[0])


def test_slopes_are_squared_without_the_loss():
    oracle, model = oracle_of("linear", ranks=1), model_of("linear")
    for how in ("slopes", "slopes by hand"):
        oracle.play(ops.Backward(key=3, rows=(2,), how=how))
        given = batch(3, 0, 2)
        given.inputs.requires_grad_()
        (slope,) = torch.autograd.grad(model(given).sum(), given.inputs, create_graph=True)
        slope.square().mean().backward()
    gradients = oracle.play(ops.ShowGradients())[0]["gradients"]
    assert "head.bias" not in gradients  # of which no slope depends
    torch.testing.assert_close(gradients["head.weight"], model.head.weight.grad)


def test_a_block_that_other_ranks_do_not_use_is_trained_by_the_first():
    unused = ops.Backward(key=3, rows=(2, 2), extra=True, alone=True, unused=True)
    oracle, model = oracle_of("extra", ranks=2), model_of("extra")
    oracle.play(unused)
    for rank in range(2):
        given = batch(3, rank, 2)
        (loss_of(model(given, extra=True, unused=rank > 0), given) / 2).backward()
        if rank == 0:
            of_first = model.parts["extra"].layer.weight.grad.clone()
    gradients = oracle.play(ops.ShowGradients())[0]["gradients"]
    torch.testing.assert_close(gradients["parts.extra.layer.weight"], of_first)
    torch.testing.assert_close(gradients["head.weight"], model.head.weight.grad)


def test_state_begins_anew_as_zeros():
    oracle = oracle_of("linear", ranks=1, kind="adam")
    for operation in (ops.Backward(key=3, rows=(2,)), ops.Step(), ops.Initialize(which=0, restarts=True)):
        oracle.play(operation)
    slots, others = (oracle.optimizers[0].state[each] for each in [*oracle.models[0].parameters()][:2])
    assert not slots["exp_avg"].any()
    assert others["exp_avg"].any()
    assert slots["step"] == others["step"] == 1


def test_steps_while_a_save_fails_leave_no_gradients_and_all_else():
    oracle = oracle_of("linear", ranks=1, kind="adam", weight_decay=0.05)
    oracle.play(ops.Backward(key=3, rows=(2,), denominator=True))
    before = oracle.state()
    shown = oracle.play(ops.Fail(how="steps"))[0]
    assert shown.pop("failed")
    assert all(torch.equal(before[name], shown[name]) for name in before if name.startswith("weights"))
    assert all(each.grad is None for each in oracle.models[0].parameters())


def test_each_rank_has_buffers_of_its_own_and_rank_zeros_are_shown():
    oracle, model = oracle_of("batch_norm", ranks=2), model_of("batch_norm")
    oracle.play(ops.Forward(key=1, how="train"))
    model(batch(1, 0, 3))
    assert_weights(oracle, model, rtol=0, atol=0)


def test_what_was_saved_comes_back():
    oracle = oracle_of("linear", ranks=2, kind="adamw")
    oracle.play(ops.Backward(key=1, rows=(2, 2)))
    oracle.play(ops.Step())
    oracle.play(ops.Save())
    before = oracle.state()
    oracle.play(ops.EditWeights(which=0))
    oracle.play(ops.Step())
    oracle.play(ops.Load())
    after = oracle.state()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(torch.as_tensor(after[name]), torch.as_tensor(value)), name


def test_a_part_that_is_added_later_begins_to_step_at_its_own_rate():
    oracle, model = oracle_of("linear", ranks=2, kind="momentum", without="linear"), model_of("linear")
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9)
    for key in range(3):
        if key == 1:
            oracle.play(ops.AddGroup(rate=0.1, decay=0.2))
            optimizer.add_param_group({"params": list(model.parts.parameters()), "lr": 0.1, "weight_decay": 0.2})
        oracle.play(ops.Backward(key=key, rows=(2, 2)))
        for rank in range(2):
            given = batch(key, rank, 2)
            (loss_of(model(given), given) / 2).backward()
        oracle.play(ops.Step())
        optimizer.step()
        assert_weights(oracle, model)
        oracle.play(ops.ZeroGrad())
        optimizer.zero_grad()
    before = oracle.state()
    oracle.play(ops.Switch(strategy="ddp"))
    after = oracle.state()
    assert before["rates.0"] == after["rates.0"] == [0.05, 0.1]
    assert torch.equal(
        before["state.0.parts.linear.layer.weight.momentum_buffer"],
        after["state.0.parts.linear.layer.weight.momentum_buffer"],
    )


def test_an_average_follows_the_weights_and_stands_in_for_them():
    oracle, model = oracle_of("linear", ranks=2, averaged=True), model_of("linear")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    oracle.play(ops.EditWeights(which=0, factor=0.0))
    oracle.play(ops.UpdateAverage())
    oracle.play(ops.Save())
    oracle.play(ops.UpdateAverage())
    oracle.play(ops.Load())
    edited, _ = next(model.named_parameters())
    before[edited] *= 0.9
    model.load_state_dict(before)
    for rank, shown in enumerate(oracle.play(ops.ShowAverage(key=2))):
        torch.testing.assert_close(shown["output"], model(batch(2, rank, 3)))
        torch.testing.assert_close(shown["averaged"], before)
    assert not oracle.state()[f"weights.0.{edited}"].any()


def test_a_contrastive_loss_trains_what_made_the_outputs_of_others():
    oracle, model = oracle_of("linear", ranks=2), model_of("linear")
    shown = oracle.play(ops.Backward(key=1, rows=(3, 3), how="contrastive"))
    outputs = torch.cat([model(batch(1, rank, 3)) for rank in range(2)])
    losses = torch.nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(6), reduction="none")
    losses.mean().backward()
    torch.testing.assert_close(torch.stack([each["loss"] for each in shown]), losses.view(2, 3).mean(1))
    gradients = oracle.play(ops.ShowGradients())[0]["gradients"]
    torch.testing.assert_close(gradients["head.weight"], model.head.weight.grad)


def test_a_loss_through_two_modules_trains_both():
    program = Program(
        seed=SEED,
        strategy="ddp",
        models=(ModelSpec(parts=("linear",)), ModelSpec(parts=())),
        optimizers=(OptimizerSpec(), OptimizerSpec(module=1)),
    )
    oracle = Oracle(program, 2, {"ddp": False})
    torch.manual_seed(SEED)
    model, critic = Model("linear"), Model()
    oracle.play(ops.Backward(key=1, rows=(1, 3), how="through", denominator=True))
    losses = []
    for rank, rows in enumerate((1, 3)):
        given = batch(1, rank, rows)
        made = given._replace(inputs=given.inputs + model(given).mean(1)[:, None, None])
        losses.append(loss_of(critic(made), given, "sum"))
    (sum(losses) / 4).backward()
    for number, each in enumerate((model, critic)):
        gradients = oracle.play(ops.ShowGradients(module=number))[0]["gradients"]
        torch.testing.assert_close(gradients["head.weight"], each.head.weight.grad)


def test_what_is_shown_in_another_shape_is_not_gone_on_from():
    oracle = oracle_of("linear", ranks=1)
    shown = {name: value.clone() for name, value in oracle.state().items() if name.startswith("weights.")}
    before = shown["weights.0.head.weight"]
    shown |= {"weights.0.head.weight": torch.ones(1, 8), "weights.0.head.bias": torch.full((3,), 7.0)}
    oracle.adopt(shown)
    after = oracle.state()
    assert torch.equal(after["weights.0.head.weight"], before)
    assert torch.equal(after["weights.0.head.bias"], torch.full((3,), 7.0))


def test_mixed_is_autocast_over_float32_at_the_mean_of_all_ranks():
    oracle = oracle_of("linear", "norm", ranks=2, precision="bf16-mixed")
    model = model_of("linear", "norm")
    shown = oracle.play(ops.Backward(key=1, rows=(2, 2)))
    for rank in range(2):
        given = batch(1, rank, 2)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(given)
        assert output.dtype == torch.bfloat16
        loss = loss_of(output, given)
        (loss / 2).backward()
        assert torch.equal(shown[rank]["loss"], loss)
    for name, gradient in oracle.play(ops.ShowGradients())[0]["gradients"].items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def test_a_step_is_skipped_where_a_gradient_overflows_and_the_factor_halved():
    oracle = oracle_of("linear", ranks=2, precision="16-mixed")
    oracle.play(ops.Backward(key=1, rows=(2, 2)))
    before = oracle.state()
    oracle.models[0].head.weight.grad[0, 0] = float("inf")
    assert oracle.play(ops.ClipValue(value=1.0)) == [{}, {}]
    after = oracle.play(ops.Step())[0]
    assert after["stepped"] is False
    assert all(torch.equal(after[name], value) for name, value in before.items() if name.startswith("weights"))


def test_two_optimizers_take_matrices_and_the_rest():
    program = Program(
        seed=SEED,
        strategy="ddp",
        world_size=1,
        models=(ModelSpec(parts=("linear", "convolution")),),
        optimizers=(OptimizerSpec(kind="muon", weight_decay=0.05), OptimizerSpec()),
    )
    oracle, model = Oracle(program, 1, {"ddp": False}), model_of("linear", "convolution")
    matrices = [each for each in model.parameters() if each.ndim == 2]
    muon = torch.optim.Muon(matrices, lr=0.002, weight_decay=0.05)
    rest = torch.optim.SGD([each for each in model.parameters() if each.ndim != 2], lr=0.05)
    given = batch(1, 0, 2)
    loss_of(model(given), given).backward()
    muon.step()
    rest.step()
    for operation in (ops.Backward(key=1, rows=(2,)), ops.Step(), ops.Step(optimizer=1)):
        oracle.play(operation)
    assert_weights(oracle, model, rtol=0, atol=0)


def test_sparse_gradients_are_averaged_like_dense_ones():
    shown = []
    for part in ("sparse", "embedding"):
        oracle = oracle_of(part, ranks=2)
        oracle.play(ops.Backward(key=1, rows=(2, 3)))
        (gradients, _) = oracle.play(ops.ShowGradients())
        shown.append({name.replace(part, "part"): each for name, each in gradients["gradients"].items()})
        oracle.jitter(torch.Generator().manual_seed(0))
    assert shown[0].keys() == shown[1].keys()
    for name, gradient in shown[0].items():
        torch.testing.assert_close(gradient, shown[1][name])
