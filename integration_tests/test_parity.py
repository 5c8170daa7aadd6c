"""A longer run than the conformance kit has time for gives the result of plain PyTorch in one process."""

from typing import Any

import pytest

from shard_core.testing import models, oracle
from shard_core.testing.training import train_under

PLACES = [
    ("single", 1),
    ("ddp", 2),
    ("fsdp", 2),
    *(pytest.param(name, 3, marks=pytest.mark.long) for name in ("ddp", "fsdp")),
]
BATCH = 12
RUN: dict[str, Any] = {"accumulate": 4, "clip": 0.1}


def train(strategy: str, optimizer: str) -> Any:
    return train_under(strategy, {}, "gpt", optimizer, steps=20, global_batch=BATCH, **RUN)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("strategy", "size"), PLACES)
def test_twenty_accumulated_and_clipped_steps(worlds: Any, strategy: str, size: int, optimizer: str) -> None:
    truth = oracle.train(
        lambda: models.make("gpt"),
        lambda module: models.make_optimizer(optimizer, module),
        models.batches("gpt", 20 * RUN["accumulate"], BATCH),
        **RUN,
    )
    assert max(truth.norms) > RUN["clip"], "clipping must have something to do"
    run = worlds(size).run(train, strategy, optimizer)[0]
    oracle.assert_same(run, truth)
    if optimizer == "sgd":
        oracle.assert_same_weights(run.weights, truth.weights, 1e-5, elementwise=True)
