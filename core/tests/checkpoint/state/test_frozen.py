from __future__ import annotations

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.checkpoint import inspect
from shard_core.errors import CheckpointMismatch, InvalidOption


def _set_up(strategy, extra=0):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3), *(nn.Linear(3, 3) for _ in range(extra)))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
    return model, optimizer


def _step(strategy, model, optimizer):
    strategy.backward(model(torch.randn(4, 3)).square().mean(), model)
    strategy.optimizer_step(optimizer)
    optimizer.zero_grad()


def _kept(path):
    return sorted(each.key for each in inspect(path).tensors if each.key.startswith("model."))


def test_what_is_frozen_is_not_written_and_not_missed(tmp_path):
    with get_strategy("single", accelerator="cpu") as strategy:
        model, optimizer = _set_up(strategy)
        _step(strategy, model, optimizer)
        strategy.save_checkpoint(tmp_path / "c", {"model": model, "optimizer": optimizer}, frozen=False)
        buffers = ["num_batches_tracked", "running_mean", "running_var"]
        assert _kept(tmp_path / "c") == [
            "model.1.weight",
            *(f"model.2.{each}" for each in ("bias", *buffers, "weight")),
        ]
        assert "shard_frozen" not in inspect(tmp_path / "c").values

        other, resumed = _set_up(strategy)
        own = other[0].weight.clone()
        assert strategy.load_checkpoint(tmp_path / "c", {"model": other, "optimizer": resumed}) == {}
        assert torch.equal(other[0].weight, own)
        assert torch.equal(other[1].weight, model[1].weight)
        moments = [each.state_dict()["state"] for each in (resumed, optimizer)]
        torch.testing.assert_close(moments[0], moments[1], rtol=0, atol=0)

        larger, _ = _set_up(strategy, extra=1)
        with pytest.raises(CheckpointMismatch, match=r"differ in 2 ways(.|\n)*'model.3.bias' is not in the checkpoint"):
            strategy.load_checkpoint(tmp_path / "c", {"model": larger})
        with pytest.raises(InvalidOption, match="frozen is 'no', of type str; give True or False"):
            strategy.save_checkpoint(tmp_path / "d", {"model": model}, frozen="no")


@pytest.mark.parametrize("name", ["single", "ddp"])
def test_the_optimizer_keeps_what_it_has_of_what_is_frozen(tmp_path, name):
    with get_strategy(name, accelerator="cpu") as strategy:
        models = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2)]
        optimizers = []
        for number, model in enumerate(models):
            model[0].requires_grad_(False)
            groups = [{"params": part.parameters(), "lr": 0.1 + number} for part in model]
            optimizers.append(torch.optim.Adagrad(groups, initial_accumulator_value=1.0 + number))
            models[number], _ = strategy.setup_module_and_optimizers(model, optimizers[-1:])
        strategy.save_checkpoint(tmp_path / "c", {"model": models[0], "optimizer": optimizers[0]}, frozen=False)
        strategy.load_checkpoint(tmp_path / "c", {"model": models[1], "optimizer": optimizers[1]})
        states = strategy.optimizer_state_dict(optimizers[1])["state"]
        assert [float(states[each]["sum"].flatten()[0]) for each in ("0.weight", "1.weight")] == [2.0, 1.0]
        assert [group["lr"] for group in optimizers[1].param_groups] == [0.1, 0.1]
        strategy.unwrap(models[1]).requires_grad_(True)
        _step(strategy, models[1], optimizers[1])


def test_what_was_trained_for_a_while_is_written(tmp_path):
    with get_strategy("single", accelerator="cpu") as strategy:
        model, optimizer = _set_up(strategy)
        model[0].requires_grad_(True)
        _step(strategy, model, optimizer)
        model[0].requires_grad_(False)
        strategy.save_checkpoint(tmp_path / "c", {"model": model}, frozen=False)
        assert {"model.0.weight", "model.0.bias"} <= set(_kept(tmp_path / "c"))
        assert "model.1.bias" not in _kept(tmp_path / "c")


def test_what_was_frozen_between_a_backward_and_its_step_is_written(tmp_path):
    with get_strategy("single", accelerator="cpu") as strategy:
        model, optimizer = _set_up(strategy)
        model[0].requires_grad_(True)
        strategy.backward(model(torch.randn(4, 3)).square().mean(), model)
        model[0].requires_grad_(False)
        strategy.optimizer_step(optimizer)
        strategy.save_checkpoint(tmp_path / "c", {"model": model}, frozen=False)
        assert {"model.0.weight", "model.0.bias"} <= set(_kept(tmp_path / "c"))


@pytest.mark.parametrize("key", ["model", "net"])
def test_what_a_checkpoint_has_filled_is_written(tmp_path, key):
    with get_strategy("single", accelerator="cpu") as strategy:
        model, optimizer = _set_up(strategy)
        model[0].requires_grad_(True)
        _step(strategy, model, optimizer)
        model[0].requires_grad_(False)
        strategy.save_checkpoint(tmp_path / "c", {"model": model}, frozen=False)
        resumed, _ = _set_up(strategy)
        strategy.load_checkpoint(tmp_path / "c", {key: resumed})
        strategy.save_checkpoint(tmp_path / "d", {"model": resumed}, frozen=False)
        assert {"model.0.weight", "model.0.bias"} <= set(_kept(tmp_path / "d"))
        assert "model.1.bias" not in _kept(tmp_path / "d")
        again, _ = _set_up(strategy)
        strategy.load_checkpoint(tmp_path / "d", {"model": again})
        assert torch.equal(again[0].weight, model[0].weight)


def test_what_was_trained_before_it_was_frozen_is_written(tmp_path):
    with get_strategy("single", accelerator="cpu") as strategy:
        model, optimizer = _set_up(strategy)
        _step(strategy, model, optimizer)
        model[1].weight.requires_grad_(False)
        model[1].bias.requires_grad_(True)
        strategy.save_checkpoint(tmp_path / "c", {"model": model}, frozen=False)
        assert {"model.1.weight", "model.1.bias"} <= set(_kept(tmp_path / "c"))
