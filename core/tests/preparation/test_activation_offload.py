"""What offloaded activations may not hide."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shard_core import SetupError, get_strategy


def test_a_parameter_changed_before_its_backward_is_refused_as_torch_does() -> None:
    with get_strategy("single", accelerator="cpu", activation_offload=True) as strategy:
        model = strategy.setup_module(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        loss = model(torch.ones(1, 2)).sum()
        with torch.no_grad():
            model[1].weight.mul_(2)
        with pytest.raises(SetupError, match=r"a parameter of shape \(2, 2\) was changed in place between the forward"):
            strategy.backward(loss, model)


def test_a_copy_of_a_module_runs_its_own_layers() -> None:
    options = {"activation_offload": True, "activation_checkpointing": nn.Linear}
    with get_strategy("single", accelerator="cpu", **options) as strategy:
        model = strategy.setup_module(nn.Sequential(nn.Linear(2, 2)))
        other = copy.deepcopy(model)
        with torch.no_grad():
            other[0].weight.zero_()
            other[0].bias.fill_(3.0)
        assert other(torch.ones(1, 2)).tolist() == [[3.0, 3.0]]


def test_casts_of_parameters_stay_where_they_are() -> None:
    with get_strategy("single", accelerator="cpu", precision="bf16-mixed", activation_offload=True) as strategy:
        model = strategy.setup_module(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
        shapes = []

        class Copies(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops.aten.copy_.default:
                    shapes.append(tuple(args[0].shape))
                return func(*args, **(kwargs or {}))

        with Copies():
            loss = model(torch.ones(5, 2)).float().sum()
        strategy.backward(loss, model)
        assert shapes
        assert all(shape[0] == 5 for shape in shapes), shapes
