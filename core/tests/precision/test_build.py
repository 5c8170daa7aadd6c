"""Names become parts, parts keep their tables, and a broken table is noticed."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import nn

from shard_core.errors import PrecisionMismatch
from shard_core.precision.build import build_precision
from shard_core.precision.dtypes import dtype_named
from shard_core.precision.policies import POLICIES


class Named(NamedTuple):
    x: torch.Tensor
    count: int


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.tied = self.layer
        self.register_buffer("scale", torch.ones(2, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


@pytest.mark.parametrize("name", POLICIES)
def test_modules_get_the_dtypes_of_the_table(name: str) -> None:
    precision = build_precision(name)
    module = Mixture()
    before = dict(module.named_parameters(remove_duplicate=False))
    precision.convert_module(module)
    precision.check_module(module)
    policy = precision.policy
    assert module.layer.weight.dtype == dtype_named(policy.parameter)
    assert module.scale.dtype == dtype_named(policy.buffer)
    assert module.count.dtype == torch.int64
    after = dict(module.named_parameters(remove_duplicate=False))
    assert all(after[key] is parameter for key, parameter in before.items())
    assert (precision.scaler is not None) == policy.scaled


def test_a_tensor_that_was_cast_back_is_named() -> None:
    precision = build_precision("bf16-true")
    module = precision.convert_module(Mixture())
    module.layer.bias.data = module.layer.bias.data.float()
    with pytest.raises(PrecisionMismatch, match=r"keeps parameters in bfloat16, but 'layer\.bias' is float32"):
        precision.check_module(module)


@pytest.mark.parametrize("name", ["bf16-true", "64-true", "16-true"])
def test_inputs_are_cast_along(name: str) -> None:
    dtype = dtype_named(POLICIES[name].compute)
    named = Named(torch.ones(1), 3)
    data = {"x": [torch.ones(1)], "y": (torch.ones(1, dtype=torch.int64), "text", None), "z": named}
    cast = build_precision(name).convert_input(data)
    assert cast["x"][0].dtype == dtype
    assert cast["y"][0].dtype == torch.int64
    assert cast["y"][1:] == ("text", None)
    assert (type(cast["z"]), cast["z"].x.dtype, cast["z"].count) == (Named, dtype, 3)


@pytest.mark.parametrize("name", ["32-true", "bf16-mixed"])
def test_inputs_come_as_in_plain_pytorch(name: str) -> None:
    data = (torch.ones(1, dtype=torch.float64),)
    assert build_precision(name).convert_input(data) is data


def test_ops_follow_autocast_in_mixed_precision() -> None:
    x, weight = torch.ones(2, 2), torch.ones(2, 2)
    with build_precision("bf16-mixed").forward_context("cpu"):
        assert (x @ weight).dtype == torch.bfloat16
    with build_precision("32-true").forward_context("cpu"):
        assert (x @ weight).dtype == torch.float32


def test_a_policy_of_ones_own_is_taken() -> None:
    policy = dataclasses.replace(POLICIES["bf16-true"], name="mine", buffer="float32")
    precision = build_precision(policy)
    module = precision.convert_module(Mixture())
    assert (module.layer.weight.dtype, module.scale.dtype) == (torch.bfloat16, torch.float32)
    assert build_precision(precision) is precision
