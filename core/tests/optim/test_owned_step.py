from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shard_core.errors import BrokenBackend
from shard_core.optim.owned_step import owned_step

KINDS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def built(kind):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    groups = [{"params": list(layer.parameters())} for layer in module]
    module(torch.ones(2, 3)).sum().backward()
    return module, KINDS[kind](groups)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_owned_steps_as_ever_and_nothing_else_does(kind):
    plain, optimizer = built(kind)
    before = copy.deepcopy(plain.state_dict())
    optimizer.step()
    module, optimizer = built(kind)
    own = [module[0].weight, module[1].bias]
    with owned_step(optimizer, lambda parameter: any(parameter is each for each in own)):
        optimizer.step()
    wanted = {**before, **{name: plain.state_dict()[name] for name in ("0.weight", "1.bias")}}
    torch.testing.assert_close(module.state_dict(), wanted, rtol=0, atol=0)
    assert [id(each) for each in optimizer.state] == [id(each) for each in own]


def test_hooks_run_once_and_see_whole_groups():
    module, optimizer = built("adamw")
    seen = []

    def look(optimizer, args, kwargs):
        seen.append([len(group["params"]) for group in optimizer.param_groups])

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    groups = [group["params"] for group in optimizer.param_groups]
    with owned_step(optimizer, lambda parameter: parameter is module[0].weight):
        optimizer.step()
    assert seen == [[2, 2], [2, 2]]
    assert all(group["params"] is each for group, each in zip(optimizer.param_groups, groups, strict=True))


def test_groups_are_whole_again_after_a_step_that_fails():
    _, optimizer = built("sgd")
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(TypeError), owned_step(optimizer, lambda parameter: parameter.dim() == 2):
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]


def test_a_closure_is_refused_that_would_see_some_parameters_only():
    _, optimizer = built("sgd")
    with owned_step(optimizer, lambda _: True), pytest.raises(BrokenBackend, match="leave CLOSURE out"):
        optimizer.step(lambda: torch.zeros(()))
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
