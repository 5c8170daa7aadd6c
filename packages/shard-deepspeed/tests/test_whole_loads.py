"""Whole values loaded after setup, onto parameters that stage 3 has spread over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shard_core import get_strategy
from shard_core.testing import models, oracle

_KINDS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1),
}


def _values() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {name: value * 0.5 + 0.01 for name, value in models.make("plain").state_dict().items()}


def _without_first() -> dict[str, torch.Tensor]:
    values = {name: value * 1.5 for name, value in _values().items() if name != "first.weight"}
    return {**values, "odd": torch.zeros(1)}


def load_and_train(kind: str, threshold: int) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    with get_strategy("deepspeed_stage_3", param_persistence_threshold=threshold) as strategy:
        module = models.make("plain")
        optimizer = _KINDS[kind](module.parameters())
        model, _ = strategy.setup_module_and_optimizers(module, [optimizer])
        strategy.unwrap(model).load_state_dict(_values())
        loaded, keys = strategy.module_state_dict(model), []
        for number, batch in enumerate(models.batches("plain", 4, 8)):
            strategy.backward(model(*batch), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            if number == 1:
                answer = strategy.unwrap(model).load_state_dict(_without_first(), strict=False)
                keys = [*answer.missing_keys, *answer.unexpected_keys]
        return loaded, strategy.module_state_dict(model), keys


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("threshold", [0, 20])
def test_whole_values_are_loaded_and_trained_on(worlds: Any, kind: str, threshold: int) -> None:
    plain = models.make("plain")
    plain.load_state_dict(_values())
    optimizer = _KINDS[kind](plain.parameters())
    for number, batch in enumerate(models.batches("plain", 4, 8)):
        plain(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            plain.load_state_dict(_without_first(), strict=False)
    results = worlds(2).run(load_and_train, kind, threshold)
    oracle.assert_same_weights(results[0][0], _values(), 1e-7)
    oracle.assert_same_weights(results[0][1], plain.state_dict(), 1e-5)
    assert all(keys == ["first.weight", "odd"] for _, _, keys in results)
