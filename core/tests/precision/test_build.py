"""Names become parts, parts keep their tables, and a broken table is noticed."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from shard_core import get_strategy
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


class Pair(tuple):
    """A tuple of a user's own."""


@dataclasses.dataclass
class Inputs:
    """What a user gives to a forward in one object."""

    x: torch.Tensor
    filled: list[torch.Tensor]


FILLED: list[torch.Tensor] = []
CONTAINERS = {
    "a dict": lambda x: {"x": x, "filled": FILLED},
    "an ordered dict": lambda x: collections.OrderedDict(x=x, filled=FILLED),
    "an object like a dict": lambda x: collections.UserDict(x=x, filled=FILLED),
    "a dataclass": lambda x: Inputs(x, FILLED),
    "a tuple": lambda x: (x, FILLED),
    "a tuple of a user's": lambda x: Pair([x, FILLED]),
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_keep_their_types_and_what_is_filled_stays_one(make: Any) -> None:
    given = make(torch.ones(2))
    cast = build_precision("64-true").convert_input((given, given))
    values = vars(cast[0]) if isinstance(cast[0], Inputs) else cast[0]
    tensor, filled = values.values() if hasattr(values, "values") else values
    assert type(cast[0]) is type(given)
    assert tensor.dtype == torch.float64
    assert filled is FILLED


def test_results_of_torch_and_sizes_are_cast_or_left() -> None:
    size, x = torch.Size([2, 3]), torch.ones(2, 3)
    cast = build_precision("64-true").convert_input((x.max(1), size, x, x))
    assert cast[0].values.dtype == torch.float64
    assert cast[1] is size
    assert cast[2] is cast[3]


@pytest.mark.parametrize("name", ["32-true", "64-true", "bf16-true", "bf16-mixed"])
def test_what_a_forward_adds_to_a_list_trains(name: str) -> None:
    class Balanced(torch.nn.Linear):
        def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            losses.append(self.weight.square().sum())
            return super().forward(x)

    strategy = get_strategy("single", accelerator="cpu", precision=name)
    model = strategy.setup_module(Balanced(3, 2))
    losses: list[torch.Tensor] = []
    model(torch.ones(1, 3), losses)
    strategy.backward(losses[0], model)
    assert bool(model.weight.grad.ne(0).all())


def test_a_policy_in_one_dtype_may_have_the_loss_scaled_and_the_factor_survives_a_restart() -> None:
    policy = dataclasses.replace(POLICIES["16-true"], optimizer="float32", scaled=True)
    precision, again = build_precision(policy), build_precision(policy)
    assert precision.scaler is not None
    assert again.scaler is not None
    assert build_precision("16-true").scaler is None
    precision.scaler.record(finite=False)
    again.load_state_dict(precision.state_dict())
    assert again.scaler.begin_backward() == precision.scaler.begin_backward() == 32768.0
    again.load_state_dict({})  # of a checkpoint of another precision
    assert again.scaler.begin_backward() == 32768.0
