"""Averages of sharded weights cost no message, and load wherever weights do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shard_core import ExponentialMovingAverage, get_strategy
from shard_core.testing import models, oracle

DECAY = 0.7
BATCHES = models.batches("gpt", 4, 4)


def whole() -> tuple[dict[str, torch.Tensor], float]:
    """Train in plain PyTorch; return the averages and the loss they have on the last batch."""
    torch.manual_seed(0)
    model = models.make("gpt")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    # Its first update only copies; ours begins with a copy.
    average.update_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in BATCHES[:3]:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return average.module.state_dict(), average.module(*BATCHES[3]).item()


def made(strategy: Any) -> Any:
    strategy.seed_everything(0)
    with strategy.module_init_context():
        model = models.make("gpt")
    model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    return model, optimizer, ExponentialMovingAverage(strategy, model, DECAY)


def train_and_save(name: str, options: dict[str, Any], path: Path) -> Any:
    with get_strategy(name, **options) as strategy:
        model, optimizer, average = made(strategy)
        messages = 0
        for batch in BATCHES[:3]:
            share = models.share(batch, strategy.distributed_sampler_kwargs["rank"], strategy.world_size)
            strategy.backward(model(*share), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            with CommDebugMode() as traffic:
                average.update()
            messages += traffic.get_total_counts()
        before = dict(strategy.full_parameters(model))
        with average.applied(), torch.no_grad():
            loss = model(*BATCHES[3]).item()
            within = dict(strategy.full_parameters(model))
        with torch.no_grad():  # no whole average may be left over
            after = model(*BATCHES[3]).item()
        for key, value in strategy.full_parameters(model):
            assert torch.equal(value, before[key])
        strategy.save_checkpoint(path, {"model": model, "ema": average})
        return messages, within, loss, after


def load(name: str, path: Path) -> Any:
    with get_strategy(name) as strategy:
        model, _, average = made(strategy)
        strategy.load_checkpoint(path, {"model": model, "ema": average})
        with average.applied():
            within = dict(strategy.full_parameters(model))
        strategy.load_checkpoint(path, {"ema": model})
        return within, dict(strategy.full_parameters(model))


def test_averages_are_those_of_plain_pytorch_without_a_message(worlds: Any, tmp_path: Path) -> None:
    truth, loss = whole()
    options = {"reshard_after_forward": False, "unit_bytes": 1}
    for messages, within, its_loss, after in worlds(2).run(train_and_save, "fsdp", options, tmp_path / "two"):
        assert messages == 0
        oracle.assert_same_weights(within, truth, 1e-6, elementwise=True)
        assert abs(its_loss - loss) < 1e-5 < abs(after - loss)


def test_averages_load_at_other_sizes_under_other_strategies_and_as_the_model(worlds: Any, tmp_path: Path) -> None:
    ((_, saved, _, _), _) = worlds(2).run(train_and_save, "fsdp", {}, tmp_path / "two")
    for name, size in (("fsdp", 1), ("single", 1), ("ddp", 2)):
        for loaded in worlds(size).run(load, name, tmp_path / "two")[0]:
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[key], saved[key]) for key in saved)


def low_precision() -> Any:
    with get_strategy("fsdp", precision="bf16-true") as strategy, torch.no_grad():
        model = strategy.setup_module(models.make("plain"))
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.fill_(1.0)
        average = ExponentialMovingAverage(strategy, model, 0.999)
        for parameter in parameters:
            parameter.fill_(2.0)
        average.update()
        return [value for p in average.kept_module.parameters() for value in p.to_local().flatten().tolist()]


def test_small_changes_count_where_parameters_have_16_bits(worlds: Any) -> None:
    for values in worlds(2).run(low_precision):
        assert values == pytest.approx([1.001] * len(values), abs=1e-6)
