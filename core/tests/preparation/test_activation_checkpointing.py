"""Which operations inside checkpointed layers keep their results, and what no policy can be."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from shard_core import InvalidOption, get_strategy

PRODUCT = torch.ops.aten.addmm


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layer": nn.Linear}, "activation_checkpointing has no 'layer'; did you mean 'layers'"),
        ({"policy": [PRODUCT]}, "activation_checkpointing is a dict without 'layers'; say which"),
        ({"layers": "Linear"}, "activation_checkpointing is 'Linear'; give a class of modules"),
        ({"layers": nn.Linear, "policy": "aten.mm"}, "has the policy 'aten.mm'; give a list of operations to keep"),
        ({"layers": nn.Linear, "policy": []}, r"has the policy \[\]; give a list of operations to keep"),
        ({"layers": nn.Linear, "policy": len}, r"policy is called as policy\(context, operation, \*args, \*\*kwargs\)"),
    ],
)
def test_what_is_no_dict_of_it_gets_a_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        get_strategy("single", activation_checkpointing=given)


@pytest.mark.parametrize("name", ["aten.nope", "nope.mm", "mm", "aten", "aten.mm.nope", "3"])
def test_what_is_no_operation_gets_a_sentence(name: str) -> None:
    given = {"layers": nn.Linear, "policy": [name]}
    message = f"names '{name}', which is no operation of torch.ops; name one"
    strategy = get_strategy("single", accelerator="cpu", activation_checkpointing=given)
    with strategy, pytest.raises(InvalidOption, match=message):
        strategy.setup_module(nn.Sequential(nn.Linear(2, 2)))


def test_operations_travel_to_other_processes_by_name() -> None:
    given = {"layers": nn.Linear, "policy": [PRODUCT.default, torch.ops.aten.mm, "aten.bmm"]}
    strategy = get_strategy("single", activation_checkpointing=given)
    travelled = pickle.loads(pickle.dumps(strategy.config))
    assert travelled.activation_checkpointing["policy"] == ("aten.addmm.default", "aten.mm", "aten.bmm")


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("torch.nn:Linear", nn.Linear),
        (["torch.nn:Linear", "torch.nn:Tanh"], [nn.Linear, nn.Tanh]),
        ({"layers": "torch.nn:Linear"}, {"layers": nn.Linear, "policy": None}),
        ({"layers": ["torch.nn:Linear"], "policy": ["aten.mm"]}, {"layers": [nn.Linear], "policy": ("aten.mm",)}),
    ],
)
def test_layers_come_from_the_environment_alone_and_in_a_dict(
    monkeypatch: pytest.MonkeyPatch, given: Any, taken: Any
) -> None:
    monkeypatch.setenv("SHARD_OPTIONS", json.dumps({"activation_checkpointing": given}))
    assert get_strategy("single").config.activation_checkpointing == taken


def test_a_policy_comes_from_the_environment_where_it_is_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"layers": "torch.nn:Linear", "policy": f"{__name__}:write_in_place"}
    monkeypatch.setenv("SHARD_OPTIONS", json.dumps({"activation_checkpointing": given}))
    assert get_strategy("single").config.activation_checkpointing == {"layers": nn.Linear, "policy": write_in_place}


@pytest.mark.parametrize("given", ["Block", ["Block"], {"layers": "Block"}, {"layers": ["Block"], "policy": []}])
def test_a_plain_name_from_the_environment_is_told_what_a_reference_is(
    monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    monkeypatch.setenv("SHARD_OPTIONS", json.dumps({"activation_checkpointing": given}))
    with pytest.raises(InvalidOption, match="activation_checkpointing is 'Block' in SHARD_OPTIONS; refer to a class"):
        get_strategy("single")


def answering(answer: Any) -> Any:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        del context, operation, args, kwargs
        return answer

    return policy


@pytest.mark.parametrize("answer", [None, "save", *(each for each in CheckpointPolicy if "CPU" in each.name)])
def test_an_answer_that_would_do_nothing_is_refused(answer: Any) -> None:
    given = {"layers": nn.Linear, "policy": answering(answer)}
    with get_strategy("single", accelerator="cpu", activation_checkpointing=given) as strategy:
        model = strategy.setup_module(nn.Sequential(nn.Linear(2, 2)))
        with pytest.raises(InvalidOption, match=r"has a policy that answers .* for aten\..*; let it answer True or"):
            model(torch.ones(1, 2))


class Written(nn.Module):
    """Writes in place, where nothing of a product is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(4)
        total.add_(self.mix(x).tanh().sum(0))
        return total * total


def gradients(**options: Any) -> list[torch.Tensor]:
    with get_strategy("single", accelerator="cpu", **options) as strategy:
        strategy.seed_everything(0)
        model = strategy.setup_module(nn.Sequential(Written()))
        strategy.backward(model(torch.ones(3, 4)).sum(), model)
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def write_in_place(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    del context, args, kwargs
    return operation is torch.ops.aten.add_.Tensor


def test_what_writes_in_place_runs_again_whatever_a_policy_says() -> None:
    found = gradients(activation_checkpointing={"layers": Written, "policy": write_in_place})
    truth = gradients()
    assert len(found) == len(truth) == 2
    assert all(torch.equal(each, true) for each, true in zip(found, truth, strict=True))


class Averaging(nn.Module):
    """Scales by a moving average of what it has seen, which is what it counts, too."""

    average: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("average", torch.ones(4))
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.linear(x))
        with torch.no_grad():
            self.average.mul_(0.5).add_(hidden.mean(0))
        # What is in its place is read: the buffer itself would be changed by the next forward, before a backward.
        return hidden * self.average.clone() * self.mask


def averaged(chosen: Any) -> dict[str, torch.Tensor]:
    """Train a few steps of two forwards each, one of them after an evaluation; return all gradients and buffers."""
    options = {} if chosen is None else {"activation_checkpointing": chosen}
    with get_strategy("single", accelerator="cpu", **options) as strategy:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(Averaging(), nn.Tanh()), nn.Linear(4, 1))
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        seen = {}
        for step in range(3):
            first, second = torch.randn(2, 8, 4)
            model.eval()
            model(first)
            model.train()
            model[0][0].norm.train(step > 0)  # as who freezes statistics at first
            loss = (model(first) * model(second)).sum()
            if not isinstance(chosen, dict):  # what torch keeps by a policy is for one backward
                strategy.backward(loss * 0, model, retain_graph=True)
            strategy.backward(loss, model)
            seen |= {f"{step}.{name}": parameter.grad.clone() for name, parameter in model.named_parameters()}
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return seen | {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize(
    "chosen",
    [
        nn.Sequential,
        nn.BatchNorm1d,
        [nn.Sequential, Averaging, nn.BatchNorm1d],
        {"layers": Averaging, "policy": ["aten.addmm"]},
    ],
)
def test_what_runs_again_changes_no_buffer_again_and_sees_those_of_before(chosen: Any) -> None:
    torch.testing.assert_close(averaged(chosen), averaged(None), rtol=1e-5, atol=1e-6)
