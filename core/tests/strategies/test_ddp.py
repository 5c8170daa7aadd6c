"""``ddp`` steps with averaged gradients or not at all, also where a loss does not reach every parameter."""

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.errors import SetupError
from shard_core.testing import models, oracle
from shard_core.testing.subject import Subject
from shard_core.testing.suites.training.runs import assert_like, plainly, train
from shard_core.testing.training import set_up


def decaying(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.5)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_an_option_lets_parameters_be_unused(worlds: Any, option: str) -> None:
    truth = plainly("unused", decaying, 4)
    runs = worlds(2).run(train, Subject(name="ddp", options={option: True}), "unused", decaying, 4)
    assert_like(runs, truth)
    unused = {name: tensor for name, tensor in truth.weights.items() if name.startswith("unused.")}
    oracle.assert_same_weights({name: runs[0].weights[name] for name in unused}, unused, 0)


def first_backward(deferred: bool) -> str:
    """Run one backward that leaves parameters out, then one that must not be deferred."""
    with get_strategy("ddp") as strategy:
        model, _ = set_up(strategy, "unused", "sgd")
        (batch,) = models.batches("unused", 1, 6)
        share = models.share_of(strategy, batch)
        if deferred:
            with strategy.no_backward_sync(model):
                strategy.backward(model(*share), model)
        try:
            strategy.backward(model(*share), model)
        except SetupError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize("deferred", [False, True])
def test_unused_parameters_are_named_before_a_step(worlds: Any, deferred: bool) -> None:
    for message in worlds(2).run(first_backward, deferred):
        assert "did not reach 2 of them, first 'unused.weight'" in message
        assert "requires_grad_(False)" in message
        assert "find_unused_parameters=True" in message


def test_messages_worth_trying_fit_the_model() -> None:
    strategy, model = get_strategy("ddp"), nn.Linear(1000, 2000)  # 7.6 MiB of gradients
    proposals = strategy.engine_worth_trying(model, 2)
    assert next(proposals) == [{"bucket_cap_mb": 1}, {"bucket_cap_mb": 5}]  # of 25 MiB there is one already
    best = {"bucket_cap_mb": 1}
    assert proposals.send(best) == [{"bucket_cap_mb": 1, "gradient_as_bucket_view": False}]
    assert next(get_strategy("ddp", bucket_cap_mb=1).engine_worth_trying(model, 2))[-1] == {"bucket_cap_mb": 8}
    assert list(strategy.engine_worth_trying(model, 1)) == []
