"""The fastest kernel that nobody ruled out, and steps that are prepared where no hook sees it."""

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.overrides import TorchFunctionMode

from shard_core.optim.kernels import KERNELS, fast_step, fastest_kernel, inside_step, is_torch_step

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


class Operations(TorchFunctionMode):
    """Notes the names of what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


class Noting(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_an_overridden_step_is_not_torchs_own() -> None:
    assert is_torch_step(optim.SGD(parameters()))
    assert not is_torch_step(Noting(parameters()))


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


def test_a_step_is_fast_and_leaves_no_trace() -> None:
    optimizer, plain = optim.AdamW(parameters(), lr=0.1), optim.AdamW(parameters(), lr=0.1, foreach=False)
    seen = []
    optimizer.register_step_pre_hook(lambda stepped, *_: seen.append(stepped.param_groups[0]["fused"]))
    for _ in range(3):
        for each in (optimizer, plain):
            for parameter in each.param_groups[0]["params"]:
                parameter.grad = parameter.detach().clone()
        with fast_step(optimizer, CPU), Operations() as operations:
            optimizer.step()
        plain.step()
        assert "_fused_adamw_" in operations.names
        assert optimizer.param_groups[0]["fused"] is None
    assert seen == [None] * 3
    for ours, theirs in zip(*(each.param_groups[0]["params"] for each in (optimizer, plain)), strict=True):
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(optimizer.state[ours], plain.state[theirs])


def test_counters_that_others_have_made_go_on() -> None:
    optimizer = optim.AdamW(parameters(), lr=0.1)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    torch.set_default_dtype(torch.float64)
    try:
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    with fast_step(optimizer, CPU):
        optimizer.step()
    assert [state["step"].item() for state in optimizer.state.values()] == [2, 2]


@pytest.mark.parametrize("make", [lambda: optim.AdamW(parameters(), fused=False), lambda: Noting(parameters())])
def test_what_is_ruled_out_steps_as_ever(make: Any) -> None:
    optimizer = make()
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    with fast_step(optimizer, CPU), Operations() as operations:
        optimizer.step()
    assert not any("fused" in name for name in operations.names)


def test_groups_added_later_are_asked_too() -> None:
    first, second = parameters()
    optimizer = optim.AdamW([first])
    for parameter in (first, second):
        parameter.grad = torch.ones_like(parameter)
    with fast_step(optimizer, CPU):
        optimizer.step()
    optimizer.add_param_group({"params": [second], "foreach": True})
    with fast_step(optimizer, CPU), Operations() as operations:
        optimizer.step()
    assert not any("fused" in name for name in operations.names)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_gradient_that_comes_late_is_stepped_as_torch_does(momentum: float) -> None:
    ours, plain = (optim.SGD(parameters(), lr=0.1, momentum=momentum, nesterov=momentum > 0) for _ in range(2))
    for late in (True, False, False):
        for each in (ours, plain):
            first, second = each.param_groups[0]["params"]
            first.grad, second.grad = torch.ones_like(first), None if late else torch.ones_like(second)
        with fast_step(ours, CPU):
            ours.step()
        plain.step()
        assert ours.param_groups[0]["fused"] is None
    for mine, theirs in zip(*(each.param_groups[0]["params"] for each in (ours, plain)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_lists_leave_gradients_alone() -> None:
    """Torch adds Nesterov's momentum to the gradients themselves when it steps lists of tensors."""
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True)
    for each in weights:
        each.grad = torch.full((3,), 2.0)
    for _ in range(2):
        with fast_step(optimizer, torch.device("cpu"), ["foreach"]):
            optimizer.step()
    assert all(torch.equal(each.grad, torch.full((3,), 2.0)) for each in weights if each.grad is not None)
