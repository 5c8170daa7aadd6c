"""What stays whole between steps at stage 3 is whole from setup on, and may be edited anywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shard_core import SetupError, get_strategy
from shard_core.testing import models, oracle, set_up, whole_weights

_STEPS, _BATCH = 3, 12
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1),
}


def scale(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)


def exchange(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.2, 0.2)


def load(model: Any) -> None:
    model.load_state_dict({name: value * 0.7 + 0.02 for name, value in model.state_dict().items()})


_EDITS = {each.__name__: each for each in (scale, exchange, load)}


class Plain:
    """One process, and torch's own calls where a strategy has its own."""

    def backward(self, loss: torch.Tensor, model: Any) -> None:
        loss.backward()

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()


def train(strategy: Any, model: Any, optimizer: torch.optim.Optimizer, share: Any, edit: str) -> None:
    """Edit before anything ran, after forwards without a backward, and between a backward and its step."""
    for number, batch in enumerate(models.batches("plain", _STEPS, _BATCH)):
        _EDITS[edit](model)
        with torch.no_grad() if number else contextlib.nullcontext():
            model(*share(batch))
        _EDITS[edit](model)
        strategy.backward(model(*share(batch)), model)
        _EDITS[edit](model)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()


def edited(kind: str) -> list[dict[str, torch.Tensor]]:
    found = []
    for edit in _EDITS:
        with get_strategy("deepspeed_stage_3") as strategy:
            model, optimizer = set_up(strategy, "plain", _OPTIMIZERS[kind])
            assert [each.shape for each in model.parameters()] == [
                each.shape for each in models.make("plain").parameters()
            ]
            train(strategy, model, optimizer, lambda batch, on=strategy: models.share_of(on, batch), edit)
            found.append(whole_weights(strategy, model))
    return found


@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_edits_between_forwards_count(worlds: Any, kind: str) -> None:
    truths = []
    for edit in _EDITS:
        torch.manual_seed(0)
        model = models.make("plain")
        train(Plain(), model, _OPTIMIZERS[kind](model), lambda batch: batch, edit)
        truths.append(model.state_dict())
    for rank in worlds(2).run(edited, kind):
        for weights, truth in zip(rank, truths, strict=True):
            oracle.assert_same_weights(weights, truth, 1e-5)


def let_go() -> tuple[list[torch.Size], str]:
    import deepspeed

    with get_strategy("deepspeed_stage_3") as strategy:
        model, _ = set_up(strategy, "plain", _OPTIMIZERS["sgd"])
        whole = [each.shape for each in model.state_dict().values()]
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            pass
        with pytest.raises(SetupError) as error:
            model.state_dict()
        model(*models.batches("plain", 1, _BATCH)[0])
        assert [each.shape for each in model.state_dict().values()] == whole
        return whole, str(error.value)


def test_what_a_user_has_let_go_of_is_missed(worlds: Any) -> None:
    expected = [each.shape for each in models.make("plain").state_dict().values()]
    for whole, message in worlds(2).run(let_go):
        assert whole == expected
        assert message.startswith("state_dict() would give 'first.weight'")
