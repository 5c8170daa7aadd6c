"""Averages of weights are plain PyTorch's on XLA devices, are spread as the weights are, and load wherever these do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from xla_environments import HASTY, spread_over

from shard_core import ExponentialMovingAverage, get_strategy
from shard_core.testing import oracle, whole_weights

DECAY = 0.7
STRATEGIES = pytest.mark.parametrize(
    ("options", "ranks", "environment"),
    [
        ({"name": "xla_fsdp", "auto_wrap_policy": {nn.Linear}}, 2, HASTY),
        ({"name": "xla_fsdp", "shard_param_on_dim_0": False}, 2, HASTY),
        ({"name": "xla_spmd", "auto_wrap_policy": {nn.Linear}}, 1, spread_over(4)),
    ],
    ids=["xla_fsdp-units", "xla_fsdp-elements", "xla_spmd"],
)


class Mixed(nn.Module):
    """Layers of odd sizes, one tied, one frozen, a parameter without dims, and a statistic that forwards change."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.again = nn.Linear(5, 5)
        self.again.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.lerp_(x.detach().mean(0), 0.1)
        return (self.again(self.frozen(self.first(x - self.seen).relu())) * self.scale).square().mean()


def make() -> tuple[Mixed, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Mixed()
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.05, momentum=0.9)


def batches() -> list[torch.Tensor]:
    return list(torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(3)))


def trained(options: dict[str, Any], path: Path) -> list[Any]:
    """Average three steps; give the weights and the loss with averages, and what comes back of a checkpoint."""
    with get_strategy(**options, accelerator="xla") as strategy:
        model, optimizer = make()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        average = ExponentialMovingAverage(strategy, model, DECAY)
        *early, last = (strategy.batch_to_device(batch) for batch in batches())
        for batch in early:
            strategy.backward(model(batch), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            average.update()
        before = whole_weights(strategy, model)
        model.eval()
        with average.applied(), torch.no_grad():
            within, loss = whole_weights(strategy, model), model(last).item()
        after = whole_weights(strategy, model)
        strategy.save_checkpoint(path, {"average": average, "model": model})
        average.update()
        strategy.load_checkpoint(path, {"average": average, "model": model})
        with average.applied():
            again = whole_weights(strategy, model)
        kept = [each.numel() for each in average.kept_module.parameters()]
        shards = [each.numel() for each in model.parameters()]
        return [before, after, within, again, loss, sorted(kept) == sorted(shards), _spread(average)]


def _spread(average: ExponentialMovingAverage) -> list[str]:
    import torch_xla

    return [torch_xla._XLAC._get_xla_sharding_spec(each) for each in average.kept_module.parameters() if each.dim()]


@STRATEGIES
def test_averages_are_those_of_plain_pytorch_and_a_shard_each(
    worlds: Any, tmp_path: Path, options: dict[str, Any], ranks: int, environment: dict[str, str]
) -> None:
    model, optimizer = make()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)  # its first only copies; ours begins with a copy
    *early, last = batches()
    for batch in early:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    truth = dict(average.module.named_parameters())
    average.module.seen.copy_(model.seen)
    with torch.no_grad():
        expected = average.eval()(last).item()
    for before, after, within, again, loss, held_as_weights, spread in worlds(ranks, environment).run(
        trained, options, tmp_path / "run"
    ):
        oracle.assert_same_weights({name: within[name] for name in truth}, truth, 2e-6, elementwise=True)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert all(torch.equal(again[name], within[name]) for name in truth)
        assert held_as_weights
        if ranks == 1:
            assert all("devices=" in each for each in spread)


def loaded(path: Path) -> dict[str, torch.Tensor]:
    with get_strategy("single", accelerator="cpu") as strategy:
        model = strategy.setup_module(make()[0])
        strategy.load_checkpoint(path, {"average": model})
        return whole_weights(strategy, model)


@STRATEGIES
def test_averages_load_as_weights_of_another_strategy(
    worlds: Any, tmp_path: Path, options: dict[str, Any], ranks: int, environment: dict[str, str]
) -> None:
    within = worlds(ranks, environment).run(trained, options, tmp_path / "run")[0][2]
    elsewhere = loaded(tmp_path / "run")
    assert all(torch.equal(elsewhere[name], within[name]) for name in within if name != "seen")
