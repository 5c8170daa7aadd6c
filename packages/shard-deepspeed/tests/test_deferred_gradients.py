"""What waits for the last micro-batch is whole in the module; what happens to the parts would not reach it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from shard_core import SetupError, get_strategy
from shard_core.testing import models, oracle, set_up, whole_weights


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


class Halves(torch.nn.Module):
    """Two layers, of which a forward uses those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        outputs = sum(getattr(self, name)(inputs) for name in names)
        return torch.nn.functional.mse_loss(outputs, targets)


def optimizers_of(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(half.parameters(), lr=0.5) for half in (model.first, model.second)]


def discard_one(model: Any, optimizers: Any, backward: Any, step: Any, deferred: Any, share: Any) -> None:
    """Throw away what one optimizer has waiting, while the other's was averaged before."""
    batches = [share(batch) for batch in models.batches("plain", 3, 12)]
    backward(model(*batches[0], ["first"]))
    with deferred():
        backward(model(*batches[1], ["second"]))
    optimizers[1].zero_grad()
    backward(model(*batches[2], ["first", "second"]))
    for optimizer in optimizers:
        step(optimizer)


def one_discarded(stage: int) -> dict[str, torch.Tensor]:
    with get_strategy("deepspeed", stage=stage) as strategy:
        strategy.setup_environment()
        torch.manual_seed(0)
        module = Halves()
        model, optimizers = strategy.setup_module_and_optimizers(module, optimizers_of(module))
        discard_one(
            model,
            optimizers,
            lambda loss: strategy.backward(loss, model),
            strategy.optimizer_step,
            lambda: strategy.no_backward_sync(model),
            lambda batch: models.share_of(strategy, batch),
        )
        return whole_weights(strategy, model)


@pytest.mark.parametrize("stage", [0, 1])
def test_what_was_averaged_for_another_optimizer_stays(worlds: Any, stage: int) -> None:
    torch.manual_seed(0)
    truth = Halves()
    discard_one(
        truth,
        optimizers_of(truth),
        lambda loss: loss.backward(),
        lambda optimizer: optimizer.step(),
        contextlib.nullcontext,
        lambda batch: batch,
    )
    for weights in worlds(2).run(one_discarded, stage):
        oracle.assert_same_weights(weights, truth.state_dict(), 1e-5)
