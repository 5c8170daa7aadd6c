"""What waits for the last micro-batch is whole in the module; what happens to the parts would not reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from shard_core import SetupError, get_strategy
from shard_core.testing import models, oracle, set_up


def parts(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [part for group in optimizer.param_groups for part in group["params"]]


def replace(tensors: Iterable[Any]) -> None:
    for tensor in tensors:
        tensor.grad = tensor.grad * 0.5


def scale(tensors: Iterable[Any]) -> None:
    for tensor in tensors:
        tensor.grad.mul_(0.5)


TO_PARTS: list[Callable[[Any, Any], None]] = [
    lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, optimizer: replace(parts(optimizer)),
    lambda model, optimizer: scale(parts(optimizer)),
]
DISCARDS: list[Callable[[Any, Any], None]] = [
    lambda model, optimizer: optimizer.zero_grad(),
    lambda model, optimizer: model.zero_grad(),
]
#: These reach all of the gradient where no earlier micro-batch was sent.
TO_MODULES: list[Callable[[Any, Any], None]] = [
    lambda model, optimizer: model.zero_grad(set_to_none=False),
    lambda model, optimizer: replace(model.parameters()),
    lambda model, optimizer: scale(model.parameters()),
]


Gradients = dict[str, torch.Tensor]


def touched(sent: bool) -> list[tuple[str, Gradients]]:
    """Touch gradients after a deferred micro-batch, perhaps with one that was sent before it.

    Returns:
        For each way what is raised, and the gradients after one more micro-batch, the second since then.
    """
    answers = []
    for touch in (*TO_PARTS, *DISCARDS, *TO_MODULES):
        with get_strategy("deepspeed", stage=1) as strategy:
            model, optimizer = set_up(strategy, "plain", "sgd")
            first, second = (models.share_of(strategy, batch) for batch in models.batches("plain", 2, 12))
            if sent:
                strategy.backward(model(*second), model)
            with strategy.no_backward_sync(model):
                strategy.backward(model(*first), model)
            touch(model, optimizer)
            message = ""
            try:
                strategy.backward(model(*second), model)
            except SetupError as error:
                message = str(error)
                strategy.backward(model(*second), model)
            answers.append((message, strategy.module_gradients(model)))
    return answers


def of_the_second_alone() -> Gradients:
    torch.manual_seed(0)
    model = models.make("plain")
    model(*models.batches("plain", 2, 12)[1]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize("sent", [False, True])
def test_what_waits_is_thrown_away_whole(worlds: Any, sent: bool) -> None:
    """Also where that was refused: a script that goes on must not step with what it has thrown away."""
    for rank, answers in enumerate(worlds(2).run(touched, sent)):
        to_parts, discards = answers[: len(TO_PARTS)], answers[len(TO_PARTS) :][: len(DISCARDS)]
        to_modules = answers[-len(TO_MODULES) :]
        for message, _ in (*to_parts, *(to_modules if sent else ())):
            assert message.startswith("gradients were changed, or some of them thrown away, 'first.weight' for one not")
        assert [message for message, _ in (*discards, *(() if sent else to_modules))] == [""] * (
            len(discards) + (0 if sent else len(to_modules))
        )
        for _, gradients in (*to_parts, *discards) if rank == 0 else ():
            oracle.assert_same_weights(gradients, of_the_second_alone(), 1e-5)
