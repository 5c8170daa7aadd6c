from __future__ import annotations

import pytest
import torch
from fixtures.single_rank import load, save, state_of
from torch import nn

from shard_core.errors import CheckpointError, CheckpointMismatch

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    model.scale = nn.Parameter(torch.tensor(0.5))
    model.register_parameter("frozen", nn.Parameter(torch.randn(2), requires_grad=False))
    return model


def _step(model: nn.Module, *optimizers: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        data = torch.linspace(-1, 1, 20).view(4, 5)
        (model(data) * model.scale).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _assert_same(found: torch.optim.Optimizer, wanted: torch.optim.Optimizer) -> None:
    one, other = found.state_dict(), wanted.state_dict()
    torch.testing.assert_close(one["state"], other["state"], rtol=0, atol=0)
    assert one["param_groups"] == other["param_groups"]
    assert [type(group["betas"]) for group in one["param_groups"] if "betas" in group] == [
        type(group["betas"]) for group in other["param_groups"] if "betas" in group
    ]


OPTIMIZERS = {
    "adamw": lambda p, lr: AdamW(p, lr=lr),
    "amsgrad": lambda p, lr: AdamW(p, lr=lr, amsgrad=True, betas=(0.8, 0.95)),
    "fused": lambda p, lr: AdamW(p, lr=lr, fused=True),
    "foreach": lambda p, lr: AdamW(p, lr=lr, foreach=True),
    "tensor-lr": lambda p, lr: AdamW(p, lr=torch.tensor(lr)),
    "sgd": lambda p, lr: SGD(p, lr=lr),
    "momentum": lambda p, lr: SGD(p, lr=lr, momentum=0.9, nesterov=True),
    "adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr, centered=True, momentum=0.1),
    "adafactor": lambda p, lr: torch.optim.Adafactor(p, lr=lr),
    "rprop": lambda p, lr: torch.optim.Rprop(p, lr=lr),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_goes_on_as_if_nothing_had_happened(tmp_path, kind, steps):
    model, other = _model(), _model(seed=1)
    optimizer, restored = OPTIMIZERS[kind](model.parameters(), 0.1), OPTIMIZERS[kind](other.parameters(), 0.7)
    _step(model, optimizer, times=steps)
    save(tmp_path / "checkpoint", model, optimizer)
    load(tmp_path / "checkpoint", other, restored)
    _assert_same(restored, optimizer)
    _step(model, optimizer, times=2)
    _step(other, restored, times=2)
    _assert_same(restored, optimizer)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_state_made_since_the_save_is_dropped(tmp_path):
    model = _model()
    optimizer = AdamW(model.parameters())
    save(tmp_path / "checkpoint", model, optimizer)
    _step(model, optimizer)
    load(tmp_path / "checkpoint", model, optimizer)
    assert optimizer.state_dict()["state"] == {}


def test_filling_keeps_the_tensors_that_are_there(tmp_path):
    model = _model()
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.1))
    _step(model, optimizer)
    save(tmp_path / "checkpoint", model, optimizer)
    before = [optimizer.param_groups[0]["lr"], *(v for s in optimizer.state.values() for v in s.values())]
    _step(model, optimizer)
    optimizer.param_groups[0]["lr"].fill_(9.0)
    load(tmp_path / "checkpoint", model, optimizer)
    after = [optimizer.param_groups[0]["lr"], *(v for s in optimizer.state.values() for v in s.values())]
    assert {id(tensor) for tensor in before} == {id(tensor) for tensor in after}
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_kernel_choices_stay_those_of_the_running_optimizer(tmp_path):
    model, other = _model(), _model()
    optimizer, restored = AdamW(model.parameters(), fused=True), AdamW(other.parameters(), foreach=True)
    _step(model, optimizer)
    save(tmp_path / "checkpoint", model, optimizer)
    load(tmp_path / "checkpoint", other, restored)
    assert restored.param_groups[0]["fused"] is None
    assert restored.param_groups[0]["foreach"] is True
    _step(other, restored)


def test_what_a_scheduler_adds_to_groups_comes_back(tmp_path):
    model, other = _model(), _model()
    optimizer, restored = SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.7)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    save(tmp_path / "checkpoint", model, optimizer)
    load(tmp_path / "checkpoint", other, restored)
    assert restored.param_groups[0]["initial_lr"] == 0.1
    torch.optim.lr_scheduler.StepLR(restored, 1, last_epoch=3)


def test_groups_may_be_divided_otherwise_if_hyper_parameters_agree(tmp_path):
    model, other = _model(), _model()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    weights = [model.get_parameter(name) for name in names]
    optimizer = AdamW([{"params": weights[:2], "lr": 0.1}, {"params": weights[2:4]}, {"params": weights[4:]}], lr=0.2)
    _step(model, optimizer)
    save(tmp_path / "checkpoint", model, optimizer)
    theirs = [other.get_parameter(name) for name in names]
    restored = AdamW([{"params": theirs[:1]}, {"params": theirs[:1:-1]}, {"params": theirs[1:2]}], lr=0.7)
    load(tmp_path / "checkpoint", other, restored)
    assert [group["lr"] for group in restored.param_groups] == [0.1, 0.2, 0.1]
    for mine, its in zip(weights, theirs, strict=True):
        torch.testing.assert_close(restored.state[its], optimizer.state[mine], rtol=0, atol=0)
    with pytest.raises(
        CheckpointMismatch, match=r"group 0, holds '.*' and '.*', which had unlike lr in the checkpoint"
    ):
        load(tmp_path / "checkpoint", other, AdamW(theirs))


def test_two_optimizers_become_one_and_one_becomes_two(tmp_path):
    model, other = _model(), _model()
    first, second = (AdamW(module.parameters(), lr=0.1) for module in (model[0], model[1:]))
    _step(model, first, second)
    save(tmp_path / "two", model, {"first": first, "second": second})
    alone = AdamW([*other[0].parameters(), *other[1:].parameters()])
    assert load(tmp_path / "two", other, alone).remainder == ()
    save(tmp_path / "one", other, alone)
    one, two = (AdamW(module.parameters()) for module in (other[0], other[1:]))
    load(tmp_path / "one", other, {"a": two, "b": one})
    _assert_same(one, first)
    _assert_same(two, second)
    assert load(tmp_path / "two", other, {"a": two}).remainder == ("first",)


def test_another_kind_of_optimizer_is_refused_and_can_be_left_alone(tmp_path):
    model, other = _model(), _model(seed=1)
    save(tmp_path / "checkpoint", model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    optimizer = AdamW(other.parameters(), lr=0.7)
    with pytest.raises(CheckpointMismatch, match=r"'betas', which the checkpoint's SGD has not") as raised:
        load(tmp_path / "checkpoint", other, optimizer)
    assert "has no 'momentum', which the checkpoint's SGD has" in str(raised.value)
    loaded = load(tmp_path / "checkpoint", other, optimizer, strict=False)
    assert len(loaded.differences) >= 2
    assert optimizer.param_groups[0]["lr"] == 0.7
    _step(other, optimizer)


def test_momentum_that_is_none_comes_back_as_none(tmp_path):
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.scale]["momentum_buffer"] = None
    save(tmp_path / "checkpoint", model, optimizer)
    optimizer.state.clear()
    load(tmp_path / "checkpoint", model, optimizer)
    assert optimizer.state[model.scale] == {"momentum_buffer": None}


def test_parameters_nobody_steps_here_are_named(tmp_path):
    model = _model()
    save(tmp_path / "checkpoint", model, AdamW(model.parameters()))
    with pytest.raises(CheckpointMismatch, match=r"of the checkpoint steps '2.bias', which no optimizer here does"):
        load(tmp_path / "checkpoint", model, AdamW([model.scale]))
    save(tmp_path / "part", model, AdamW([model.scale]))
    with pytest.raises(CheckpointMismatch, match=r"steps '2.bias', for which the checkpoint has no optimizer"):
        load(tmp_path / "part", model, AdamW(model.parameters()))


def test_optimizers_that_cannot_be_kept_are_refused_by_name(tmp_path):
    model, stranger = _model(), nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="optimizer 'optimizer' steps no parameter of any module"):
        state_of(model, SGD(stranger.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match=r"group 1, steps a parameter of shape \(2, 2\)"):
        state_of(model, SGD([{"params": [model.scale]}, {"params": stranger.parameters()}], lr=0.1))
    shared = {key: SGD([model.scale], lr=0.1) for key in ("a", "b")}
    with pytest.raises(CheckpointError, match="optimizers 'a' and 'b' both step 'scale'"):
        state_of(model, shared)
    odd = SGD([{"params": [model.scale], "hook": print}], lr=0.1)
    with pytest.raises(CheckpointError, match=r"optimizer\[SGD\].param_groups.0.hook' is a builtins.builtin_function"):
        save(tmp_path / "checkpoint", model, odd)
    history = torch.optim.LBFGS(model.parameters())
    history.state[model.scale]["old_dirs"] = [torch.ones(3)]
    with pytest.raises(CheckpointError, match=r"optimizer\[LBFGS\].state.*old_dirs.0' is a tensor of shape"):
        save(tmp_path / "checkpoint", model, history)
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3.0)])
def test_a_counter_that_another_optimizer_kept_as_a_number_fills_the_tensor_here(tmp_path, count):
    model, other = _model(), _model(seed=1)
    optimizer, restored = AdamW(model.parameters()), AdamW(other.parameters())
    _step(model, optimizer)
    _step(other, restored)
    for slots in optimizer.state.values():
        slots["step"] = count
    save(tmp_path / "checkpoint", model, optimizer)
    counters = [slots["step"] for slots in restored.state.values()]
    load(tmp_path / "checkpoint", other, restored)
    assert [slots["step"].item() for slots in restored.state.values()] == [3.0] * len(counters)
    assert all(slots["step"] is here for slots, here in zip(restored.state.values(), counters, strict=True))


def test_hyper_parameters_and_counters_of_another_kind_are_named_before_anything_is_touched(tmp_path):
    model, other = _model(), _model(seed=1)
    optimizer, restored = AdamW(model.parameters(), lr=0.5), AdamW(other.parameters(), lr=0.7)
    _step(model, optimizer)
    _step(other, restored)
    optimizer.param_groups[0].update(lr="fast", betas=(0.9,), eps=[1e-8])
    optimizer.state[model.scale]["step"] = "three"
    save(tmp_path / "checkpoint", model, optimizer)
    before = other.scale.clone()
    with pytest.raises(CheckpointMismatch) as raised:
        load(tmp_path / "checkpoint", other, restored)
    for difference in (
        "has 'lr' of 0.7, which in the checkpoint is 'fast'",
        "has 'betas' of (0.9, 0.999), which in the checkpoint is (0.9,)",
        "has 'eps' of 1e-08, which in the checkpoint is [1e-08]",
        "has 'scale.step' of tensor(1.), which in the checkpoint is 'three'",
    ):
        assert difference in str(raised.value)
    assert torch.equal(other.scale, before)
    assert restored.param_groups[0]["lr"] == 0.7
