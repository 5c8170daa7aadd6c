"""Modules whose dtype is changed after setup: torch's wrapper no longer hears of their gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.testing import models, oracle

CASTS: dict[str, Callable[[Any], object]] = {
    "there and back": lambda module: module.bfloat16().float(),
    "to float64": lambda module: module.double(),
    "one layer": lambda module: module.first.bfloat16().float(),
    "to itself": lambda module: module.float(),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = models.make("plain")
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def in_dtype(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    return [tensor.to(next(model.parameters()).dtype) for tensor in batch]


def under_ddp(cast: str, options: dict[str, Any]) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Train, with a cast in the middle; return gradients of the steps, and the weights."""
    with get_strategy("ddp", **options) as strategy:
        own, optimizer = build()
        model, (optimizer,) = strategy.setup_module_and_optimizers(own, [optimizer])
        gradients = []
        for number, batch in enumerate(models.batches("plain", 4, 24)):
            if number == 2:
                CASTS[cast](own)
            strategy.backward(model(*in_dtype(own, models.share_of(strategy, batch))), model)
            gradients.append({name: parameter.grad.clone() for name, parameter in own.named_parameters()})
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return gradients, own.state_dict()


def plainly(cast: str) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    model, optimizer = build()
    gradients = []
    for number, batch in enumerate(models.batches("plain", 4, 24)):
        if number == 2:
            CASTS[cast](model)
        for rank in range(2):
            (model(*in_dtype(model, models.share(batch, rank, 2))) / 2).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return gradients, model.state_dict()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("cast", CASTS)
def test_gradients_are_averaged_after_a_cast(worlds: Any, cast: str, options: str) -> None:
    expected, weights = plainly(cast)
    for gradients, mine in worlds(2).run(under_ddp, cast, OPTIONS[options]):
        for shown, truth in zip(gradients, expected, strict=True):
            oracle.assert_same_weights(shown, truth, 1e-5)
        oracle.assert_same_weights(mine, weights, 1e-5)
