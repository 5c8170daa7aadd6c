"""Every strategy gives the training result of plain PyTorch in one process."""

import math
from typing import Any

import pytest
import torch

from shard_core import get_strategy
from shard_core.testing import models, oracle
from shard_core.testing.training import train_under

PLACES = [("single", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3)]
BATCH = 12


def train(strategy: str, options: dict[str, Any], model: str, optimizer: str, settings: dict[str, Any]) -> Any:
    return train_under(strategy, options, model, optimizer, global_batch=BATCH, **settings)


def expected(model: str, optimizer: str, *, steps: int = 20, accumulate: int = 1, **settings: Any) -> oracle.Trajectory:
    return oracle.train(
        lambda: models.make(model),
        lambda module: models.make_optimizer(optimizer, module),
        models.batches(model, steps * accumulate, BATCH),
        accumulate=accumulate,
        **settings,
    )


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("model", ["gpt", "frozen"])
@pytest.mark.parametrize(("strategy", "size"), PLACES)
def test_float32(worlds: Any, strategy: str, size: int, model: str, optimizer: str, accumulate: int) -> None:
    settings: dict[str, Any] = {"steps": 20, "accumulate": accumulate, "clip": 0.1}
    truth = expected(model, optimizer, **settings)
    assert max(truth.norms) > 0.1, "clipping must have something to do"
    run = worlds(size).run(train, strategy, {}, model, optimizer, settings)[0]
    oracle.assert_same(run, truth)
    if optimizer == "sgd":
        oracle.assert_same_weights(run.weights, truth.weights, 1e-5, elementwise=True)


@pytest.mark.parametrize("model", ["plain", "buffers", "uneven", "scalar", "unused"])
@pytest.mark.parametrize(("strategy", "size"), PLACES)
def test_odd_models(worlds: Any, strategy: str, size: int, model: str) -> None:
    options = {"find_unused_parameters": True} if (strategy, model) == ("ddp", "unused") else {}
    settings: dict[str, Any] = {"steps": 10, "accumulate": 2}
    run = worlds(size).run(train, strategy, options, model, "sgd", settings)[0]
    oracle.assert_same(run, expected(model, "sgd", **settings), elementwise=True)


@pytest.mark.parametrize("norm_type", [1.0, math.inf])
@pytest.mark.parametrize(("strategy", "size"), PLACES)
def test_other_norms(worlds: Any, strategy: str, size: int, norm_type: float) -> None:
    settings: dict[str, Any] = {"steps": 4, "clip": 0.01, "norm_type": norm_type}
    run = worlds(size).run(train, strategy, {}, "gpt", "sgd", settings)[0]
    oracle.assert_same(run, expected("gpt", "sgd", **settings), elementwise=True)


@pytest.mark.parametrize(("strategy", "size"), PLACES)
def test_optimizer_with_eager_state(worlds: Any, strategy: str, size: int) -> None:
    run = worlds(size).run(train, strategy, {}, "gpt", "adagrad", {"steps": 5})[0]
    oracle.assert_same(run, expected("gpt", "adagrad", steps=5))


@pytest.mark.parametrize(("strategy", "size"), PLACES)
def test_bf16_mixed_is_autocast_over_float32_parameters(worlds: Any, strategy: str, size: int) -> None:
    run = worlds(size).run(train, strategy, {"precision": "bf16-mixed"}, "gpt", "adamw", {"steps": 20})[0]
    truth = expected("gpt", "adamw", autocast_dtype=torch.bfloat16)
    oracle.assert_same_numbers("loss", run.losses, truth.losses, 2e-3)
    oracle.assert_same_numbers("gradient norm", run.norms, truth.norms, 1e-2)
    assert all(tensor.dtype == torch.float32 for tensor in run.weights.values())


@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)])
@pytest.mark.parametrize(("strategy", "size"), PLACES)
def test_true_precisions(worlds: Any, strategy: str, size: int, precision: str, dtype: torch.dtype) -> None:
    run = worlds(size).run(train, strategy, {"precision": precision}, "gpt", "sgd", {"steps": 3})[0]
    truth = oracle.train(
        lambda: models.make("gpt").to(dtype),
        lambda module: models.make_optimizer("sgd", module),
        models.batches("gpt", 3, BATCH),
    )
    assert {tensor.dtype for tensor in run.weights.values()} == {dtype}
    bound = 1e-12 if dtype is torch.float64 else 2e-2
    oracle.assert_same_numbers("loss", run.losses, truth.losses, bound)
    oracle.assert_same_numbers("gradient norm", run.norms, truth.norms, bound)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("strategy", "size"), PLACES)
def test_denominator_gives_the_global_mean(worlds: Any, strategy: str, size: int, accumulate: int) -> None:
    settings: dict[str, Any] = {"steps": 5, "accumulate": accumulate}
    run = worlds(size).run(train, strategy, {}, "gpt", "sgd", {**settings, "denominator": True})[0]
    oracle.assert_same(run, expected("gpt", "sgd", **settings), elementwise=True)


def ragged_norm(strategy_name: str, rows: list[list[int]]) -> float:
    """Take one step on micro-batches of other sizes on every rank; rows[micro][rank] samples each."""
    with get_strategy(strategy_name) as strategy:
        torch.manual_seed(0)
        model = models.make("plain")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        ((inputs, targets),) = models.batches("plain", 1, sum(map(sum, rows)))
        begin = 0
        for number, sizes in enumerate(rows):
            first = begin + sum(sizes[: strategy.global_rank])
            mine = slice(first, first + sizes[strategy.global_rank])
            begin += sum(sizes)
            with strategy.no_backward_sync(model, enabled=number < len(rows) - 1):
                loss = model(inputs[mine], targets[mine], reduction="sum")
                strategy.backward(loss, model, denominator=targets[mine].numel())
        return strategy.clip_gradients_norm(model, optimizer, math.inf).item()


@pytest.mark.parametrize(("strategy", "rows"), [
    ("single", [[5], [2], [1]]),
    ("ddp", [[5, 1], [2, 7]]),
    ("ddp", [[1, 4, 2]]),
    ("fsdp", [[5, 1], [2, 7]]),
    ("fsdp", [[1, 4, 2], [3, 3, 9]]),
])  # fmt: skip
def test_ragged_batches_equal_the_global_mean(worlds: Any, strategy: str, rows: list[list[int]]) -> None:
    torch.manual_seed(0)
    model = models.make("plain")
    model(*models.batches("plain", 1, sum(map(sum, rows)))[0]).backward()
    truth = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
    norms = worlds(len(rows[0])).run(ragged_norm, strategy, rows)
    assert norms == pytest.approx([truth] * len(norms), rel=2e-6)
