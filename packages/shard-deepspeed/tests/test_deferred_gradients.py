"""What waits for the last micro-batch is whole in the module; what happens to the parts would not reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

from shard_core import SetupError, get_strategy
from shard_core.testing import models, set_up

if TYPE_CHECKING:
    import torch


def parts(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [part for group in optimizer.param_groups for part in group["params"]]


def replace(tensors: Iterable[Any]) -> None:
    for tensor in tensors:
        tensor.grad = tensor.grad * 0.5


def scale(tensors: Iterable[Any]) -> None:
    for tensor in tensors:
        tensor.grad.mul_(0.5)


TO_PARTS: list[Callable[[Any, Any], None]] = [
    lambda model, optimizer: optimizer.zero_grad(),
    lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, optimizer: replace(parts(optimizer)),
    lambda model, optimizer: scale(parts(optimizer)),
]
#: These reach all of the gradient where no earlier micro-batch was sent.
TO_MODULES: list[Callable[[Any, Any], None]] = [
    lambda model, optimizer: model.zero_grad(set_to_none=False),
    lambda model, optimizer: replace(model.parameters()),
    lambda model, optimizer: scale(model.parameters()),
]


def touched(sent: bool) -> list[str]:
    """Touch gradients after a deferred micro-batch, perhaps with one that was sent before it; return what is raised."""
    messages = []
    first, second = models.batches("plain", 2, 12)
    for touch in (*TO_PARTS, *TO_MODULES):
        with get_strategy("deepspeed", stage=1) as strategy:
            model, optimizer = set_up(strategy, "plain", "sgd")
            if sent:
                strategy.backward(model(*models.share_of(strategy, second)), model)
            with strategy.no_backward_sync(model):
                strategy.backward(model(*models.share_of(strategy, first)), model)
            touch(model, optimizer)
            loss = model(*models.share_of(strategy, second))
            try:
                strategy.backward(loss, model)
                messages.append("")
            except SetupError as error:
                messages.append(str(error))
    return messages


@pytest.mark.parametrize("sent", [False, True])
def test_what_waits_is_not_thrown_away_in_part(worlds: Any, sent: bool) -> None:
    for messages in worlds(2).run(touched, sent):
        for message in messages[: None if sent else len(TO_PARTS)]:
            assert message.startswith("the gradient of 'first.weight' was thrown away or changed while it waits on its")
        if not sent:
            assert messages[len(TO_PARTS) :] == [""] * len(TO_MODULES)
