"""Optimizers that are made after ``setup_module``, when stage 3 has spread parameters over ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from shard_core import get_strategy
from shard_core.testing import models, oracle, whole_weights

_STEPS, _BATCH = 4, 12


def by_dims(model: Any) -> list[dict[str, Any]]:
    """Form groups as everyone does, by what is a matrix, which cannot be seen where a parameter's values are away."""
    parameters = list(model.parameters())
    return [
        {"params": [each for each in parameters if each.ndim >= 2]},
        {"params": [each for each in parameters if each.ndim < 2], "lr": 0.2, "weight_decay": 0.0},
    ]


_KINDS: dict[str, Any] = {
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.2),
    "sgd": lambda model: torch.optim.SGD(by_dims(model), lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda model: torch.optim.AdamW(by_dims(model), lr=0.02, weight_decay=0.1),
}


def make(frozen: bool) -> Any:
    model = models.make("plain")
    for parameter in list(model.parameters())[:2] if frozen else ():
        parameter.requires_grad_(False)
    return model


def train_late(kind: str, threshold: int, stage: int, frozen: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    options: dict[str, Any] = {"param_persistence_threshold": threshold} if stage == 3 else {}
    with get_strategy("deepspeed", stage=stage, **options) as strategy:
        torch.manual_seed(0)
        model = strategy.setup_module(make(frozen))
        with whole(model, away=not threshold and kind != "adagrad"):
            optimizer = strategy.setup_optimizer(_KINDS[kind](model))
        for batch in models.batches("plain", _STEPS, _BATCH):
            strategy.backward(model(*models.share_of(strategy, batch)), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return whole_weights(strategy, model), strategy.optimizer_state_dict(optimizer).get("state", {})


def whole(model: Any, *, away: bool) -> contextlib.AbstractContextManager[Any]:
    if not away:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


@pytest.mark.parametrize(("kind", "frozen"), [*((kind, False) for kind in _KINDS), ("adagrad", True)])
@pytest.mark.parametrize(("stage", "threshold"), [(3, 0), (3, 100_000), (2, 100_000)])
def test_a_late_optimizer_trains_as_an_early_one(
    worlds: Any, kind: str, threshold: int, stage: int, frozen: bool
) -> None:
    torch.manual_seed(0)
    plain = make(frozen)
    optimizer = _KINDS[kind](plain)
    for batch in models.batches("plain", _STEPS, _BATCH):
        plain(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, _ in plain.named_parameters()]
    held = [each for group in optimizer.param_groups for each in group["params"]]
    answers = worlds(2).run(train_late, kind, threshold, stage, frozen)
    for weights, _ in answers:
        oracle.assert_same_weights(weights, plain.state_dict(), 1e-5)
    for name, parameter in plain.named_parameters():
        assert any(parameter is each for each in held)
        for slot, value in optimizer.state[parameter].items():
            torch.testing.assert_close(torch.as_tensor(answers[0][1][name][slot]), value, rtol=1e-4, atol=1e-7)
    assert sorted(answers[0][1]) == sorted(names)
