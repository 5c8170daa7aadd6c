"""The fastest kernel that nobody ruled out, and steps that are prepared where no hook sees it."""

from typing import Any

import pytest
import torch
from torch import nn, optim

from shard_core.kernels import KERNELS, fastest_kernel, inside_step, torchs_own

CPU = torch.device("cpu")


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(2, dtype=dtype))]


@pytest.mark.parametrize(
    ("optimizer", "among", "kernel"),
    [
        (optim.AdamW(parameters()), KERNELS, "fused"),
        (optim.AdamW(parameters()), ["foreach"], "foreach"),
        (optim.NAdam(parameters()), KERNELS, "foreach"),  # has no fused one
        (optim.AdamW(parameters(torch.bfloat16)), KERNELS, "foreach"),  # fused rounds less often
        (optim.AdamW(parameters(), fused=False), KERNELS, None),
        (optim.AdamW([{"params": [each]} for each in parameters()], foreach=False), KERNELS, None),
        (optim.AdamW(parameters(), lr=torch.tensor(0.1)), ["foreach"], None),  # torch refuses
        (optim.LBFGS(parameters()), KERNELS, None),
    ],
)
def test_the_fastest_that_nobody_ruled_out(optimizer: optim.Optimizer, among: Any, kernel: str | None) -> None:
    assert fastest_kernel(optimizer, CPU, among) == ({kernel: True} if kernel else {})


def test_one_group_that_chooses_chooses_for_all() -> None:
    first, second = parameters()
    optimizer = optim.AdamW([{"params": [first]}, {"params": [second], "foreach": True}])
    assert fastest_kernel(optimizer, CPU) == {}


class Noting(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_an_overridden_step_is_not_torchs_own() -> None:
    assert torchs_own(optim.SGD(parameters()))
    assert not torchs_own(Noting(parameters()))


def test_no_hook_sees_what_is_prepared() -> None:
    optimizer, order = optim.SGD(parameters()), []
    optimizer.register_step_pre_hook(lambda *_: order.append("hook before"))
    optimizer.register_step_post_hook(lambda *_: order.append("hook after"))
    with inside_step(optimizer, lambda *_: order.append("enter"), lambda *_: order.append("leave")):
        optimizer.step()
    assert order == ["hook before", "enter", "leave", "hook after", "leave"]
    order.clear()
    optimizer.step()
    assert order == ["hook before", "hook after"]


def test_a_step_that_fails_is_left() -> None:
    optimizer, order = optim.AdamW(parameters()), []
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.param_groups[0]["betas"] = None
    with (
        pytest.raises(TypeError),
        inside_step(optimizer, lambda *_: order.append("enter"), lambda *_: order.append("leave")),
    ):
        optimizer.step()
    assert order == ["enter", "leave"]
