"""Optimizers follow their parameters by name, with groups, schedulers and state."""

import pytest
import torch
from torch import nn

from shard_core.errors import SetupError
from shard_core.parameters import (
    ParameterNames,
    check_hooks_kept,
    check_no_gradients,
    plain_module_name,
    plain_name,
)


def renew(module: nn.Module) -> None:
    """Replace every parameter object, as sharding does, ties kept."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            new = made.setdefault(id(parameter), nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
            setattr(owner, name, new)


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("weight", "weight"),
        ("_orig_mod.weight", "weight"),
        ("blocks.0._checkpoint_wrapped_module.norm.bias", "blocks.0.norm.bias"),
        ("_orig_mod.a._orig_mod.b", "a.b"),
        ("_orig_mod", "_orig_mod"),  # a parameter of the user's own
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ],
)
def test_wrappers_leave_no_trace_in_names(name: str, plain: str) -> None:
    assert plain_name(name) == plain


@pytest.mark.parametrize(("name", "plain"), [("_orig_mod", ""), ("", ""), ("a._orig_mod.b._orig_mod", "a.b")])
def test_a_wrapper_has_the_name_of_what_it_wraps(name: str, plain: str) -> None:
    assert plain_module_name(name) == plain


def test_ties_have_several_names_and_one_parameter() -> None:
    names = ParameterNames(tied())
    assert names.ties == [["0.weight", "1.weight"]]
    assert len(list(names.parameters())) == 3


def test_optimizer_and_scheduler_go_on_with_the_new_parameters() -> None:
    model = tied()
    groups = [{"params": [model[0].weight], "lr": 0.5}, {"params": [model[0].bias, model[1].bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    names = ParameterNames(model)
    lists = [group["params"] for group in optimizer.param_groups]
    renew(model)
    names.repoint([optimizer], model)
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [
        id(model[0].weight),
        id(model[0].bias),
        id(model[1].bias),
    ]
    assert all(group["params"] is before for group, before in zip(optimizer.param_groups, lists, strict=True))
    before = model[0].weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert not torch.equal(model[0].weight, before)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.05]


@pytest.mark.parametrize("optimizer_type", [torch.optim.AdamW, torch.optim.Adagrad])
def test_state_that_exists_moves_along(optimizer_type: type[torch.optim.Optimizer]) -> None:
    model = nn.Linear(3, 2)
    optimizer = optimizer_type(model.parameters())  # type: ignore[call-arg]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
    names = ParameterNames(model)
    renew(model)
    names.repoint([optimizer], model)
    assert len(optimizer.state) == 2
    for name, parameter in model.named_parameters():
        assert optimizer.state[parameter].keys() == expected[name].keys()
        for slot, value in expected[name].items():
            assert torch.equal(optimizer.state[parameter][slot], value)


def test_a_foreign_parameter_is_refused() -> None:
    model = nn.Linear(3, 2)
    names = ParameterNames(model)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(7))], lr=0.1)
    with pytest.raises(SetupError, match=r"shape \(7,\) that the module does not have; set up the module"):
        names.repoint([optimizer], model)


def test_gradients_are_not_thrown_away_silently() -> None:
    model = nn.Linear(3, 2)
    check_no_gradients(ParameterNames(model))
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(SetupError, match="'weight' has a gradient already"):
        check_no_gradients(ParameterNames(model))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_are_not_lost_silently(register: str) -> None:
    model = nn.Linear(3, 2)
    names = ParameterNames(model)
    hook = getattr(model.bias, register)(lambda _: None)
    check_hooks_kept(names, model)
    model.bias = nn.Parameter(model.bias.detach())
    with pytest.raises(SetupError, match="'bias' has a hook on its gradient that nothing would call"):
        check_hooks_kept(names, model)
    hook.remove()
    check_hooks_kept(names, model)
